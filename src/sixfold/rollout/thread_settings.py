"""PyTorch's settings that belong to a thread."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ThreadSettings:
    """Settings of a thread, to be repeated in another one.

    Attributes:
        threads: number of threads for computations.
        gpu: the current GPU, on which kernels start. None if no GPU is in use.
    """

    threads: int
    gpu: int | None

    @classmethod
    def here(cls) -> ThreadSettings:
        """Those of the calling thread."""
        gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        return cls(torch.get_num_threads(), gpu)

    def apply(self) -> None:
        """Set them in the calling thread."""
        torch.set_num_threads(self.threads)
        if self.gpu is not None:
            torch.cuda.set_device(self.gpu)
