"""Keeps megatron-core's remarks about optional packages out of a user's terminal; torch-free."""

from __future__ import annotations

import logging
import warnings


def quiet_megatron() -> None:
    """Silence what megatron-core warns of on import and per call; call before importing it.

    Absent accelerators are said by ``miniverl-dist doctor``, once. Deprecations inside
    megatron-core are for its authors.
    """
    for category in (UserWarning, DeprecationWarning, FutureWarning):
        warnings.filterwarnings("ignore", category=category, module=r"megatron\.")
    # torch names itself as the place of these; megatron-core is what calls the old names.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+_tensor` is deprecated")
    logging.getLogger("megatron").setLevel(logging.ERROR)
