"""PyTorch's torch.distributed over dp.h: the backend "dp", for tensors on the CPU.

    import dp_c10d, torch
    torch.distributed.init_process_group("dp")

Importing this package imports torch first, whose libraries the compiled part needs. That part is
for the torch that it was built with: another one has other types under the same names.
"""

import torch

from ._built import TORCH


def _series(version):
    return version.split("+")[0].split(".")[:2]


if _series(torch.__version__) != _series(TORCH):
    raise ImportError(
        f"dp_c10d was built with torch {TORCH}, and this is torch {torch.__version__}: "
        "build it again, pip install --force-reinstall --no-deps FOLDER_OF_DP/examples/torch"
    )

from . import _c10d  # noqa: E402,F401  registers the backend
