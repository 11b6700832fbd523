"""Names of the metrics that more than one module reads."""

EVAL_RETURN = "eval/episode_return"
MEAN_RETURN = "rollout/episode_return_mean_100"
