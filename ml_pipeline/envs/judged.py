"""What an env may answer beyond Gymnasium: is a run to be trusted, what does its policy need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable


@runtime_checkable
class JudgedEnv(Protocol):
    """What the class of such an env answers; studies and the command ``evaluate`` ask it."""

    judge_command: ClassVar[str]  # judges a run: python -m ml_pipeline COMMAND RUN
    # Dotted path of a function: (run folder, n_trials it was selected from) -> facts for its
    # deployment. It raises a UserError if the run must not be deployed.
    judge: ClassVar[str]

    @classmethod
    def why_not_select(cls, kwargs: Mapping[str, object]) -> str | None:
        """Why a study must not select trials by this env with these arguments, or None."""


@runtime_checkable
class HasExportFacts(Protocol):
    """An env that an exported policy needs facts of, beyond its spaces."""

    def export_facts(self) -> dict[str, Any]:
        """Plain data for the metadata of the policy file."""
