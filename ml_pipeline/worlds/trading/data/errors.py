"""DataError: a market file or a setting of market data that cannot be used, in one line."""

from __future__ import annotations

from ml_pipeline.errors import UserError


class DataError(UserError):
    """The message names the file and the line, or the config key, and the reason."""
