"""Ideas beside PPO's path, off by default; docs/ideas/ has a page of evidence for each."""
