"""The simple noise scale from the norms of two batch sizes (McCandlish et al., arXiv 1812.06162, A.1).

The squared norm of a gradient over ``B`` samples is expected to be ``|G|^2 + S / B``: of the true gradient,
and noise that averages out. Two batch sizes give two equations for the signal ``|G|^2`` and the noise ``S``.
"""

from __future__ import annotations


class NoiseScale:
    """Moving averages of signal and noise; their ratio is the noise scale, in samples.

    Both estimates are unbiased and very noisy, a ratio of them is not: so they are averaged before they are
    divided. Their averages begin at zero alike, which the ratio does not show.

    Attributes:
        signal: ``|G|^2``; may be negative while there are few steps.
        noise: ``S``, the summed variance of the gradient of one sample.
    """

    def __init__(self, decay: float, signal: float = 0.0, noise: float = 0.0) -> None:
        """Start, from stored averages where there are some.

        Args:
            decay: share of the past that stays at each update, in [0, 1).
            signal: where the average of the signal stands.
            noise: where the average of the noise stands.
        """
        self.decay = decay
        self.signal = signal
        self.noise = noise

    def update(self, small: float, big: float, small_batch: int, big_batch: int) -> None:
        """Take in a step.

        Args:
            small: squared norm of the gradient of a small batch.
            big: squared norm of the gradient of the whole step.
            small_batch: samples behind ``small``.
            big_batch: samples behind ``big``, more than ``small_batch``.
        """
        signal = (big_batch * big - small_batch * small) / (big_batch - small_batch)
        noise = (small - big) / (1.0 / small_batch - 1.0 / big_batch)
        self.signal = self.decay * self.signal + (1.0 - self.decay) * signal
        self.noise = self.decay * self.noise + (1.0 - self.decay) * noise
