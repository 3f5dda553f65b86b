"""Samples to log-mel frames, whole or piece by piece with the same result.

    frame k covers the samples [k hop, k hop + window)          window 25 ms, hop 10 ms, Hann, no padding
    power[f]  = |FFT|^2 / (sum of window^2 * FFT length)
    mel[m]    = log(floor + sum_f filter[m, f] power[f])        floor 1e-8: about a 16-bit recording's rounding noise
    feature   = (mel - mean) / deviation                        per band, over the training data

Power is divided so that a sound has the same features at any sample rate: recordings with different rates may be
mixed, as long as the top band lies below half of the lowest rate.  Mean and deviation are constants of the model and
nothing looks beyond its window, so features stream with 25 ms of delay.

samples [N] float32 in [-1, 1]; features [frames, bands] float32, natural log, unit variance.
Before: data.py.  After: batches.py, or decode.py when streaming.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

WINDOW_SECONDS = 0.025
HOP_SECONDS = 0.010
FLOOR = 1e-8
LOW_HZ = 60.0


class LogMel(nn.Module):
    """Log-mel features with the normalisation as buffers.

    Args:
        bands: number of mel bands.
        top_hz: upper edge of the last band.
    """

    mean: Tensor  # [bands]
    deviation: Tensor  # [bands]

    def __init__(self, bands: int = 40, top_hz: float = 3800.0) -> None:
        super().__init__()
        self.bands = bands
        self.top_hz = top_hz
        self.register_buffer("mean", torch.zeros(bands))
        self.register_buffer("deviation", torch.ones(bands))
        self._filters: dict[tuple[int, torch.device], Tensor] = {}

    def fit(self, mels: Iterable[Tensor]) -> None:
        """Set mean and deviation from the `mels` [frames, bands] of the training data."""
        frames = torch.cat(list(mels)).double()
        if len(frames) < 2:
            raise ValueError(f"mels: expected at least 2 frames to normalise with, got {len(frames)}")
        self.mean.copy_(frames.mean(0))
        self.deviation.copy_(frames.std(0).clamp(min=1e-3))

    def forward(self, samples: Tensor, rate: int) -> Tensor:
        """Normalised features [frames, bands] of samples [N]."""
        return (self.mels(samples, rate) - self.mean) / self.deviation

    def mels(self, samples: Tensor, rate: int) -> Tensor:
        """Log-mel frames [frames, bands] of samples [N]; no frames when the samples are shorter than one window."""
        if self.top_hz > rate / 2:
            raise ValueError(
                f"rate: expected at least {2 * self.top_hz:.0f} Hz for bands up to {self.top_hz:.0f} Hz, got {rate}"
            )
        window, hop = frame_size(rate)
        if len(samples) < window:
            return samples.new_zeros(0, self.bands)
        taper = torch.hann_window(window, periodic=False, device=samples.device)
        # At least two FFT bins for the narrowest band (45 Hz): zero-padding interpolates the spectrum.
        length = 2 ** math.ceil(math.log2(max(window, rate / 16)))
        spectrum = torch.fft.rfft(samples.unfold(0, window, hop) * taper, length)  # [frames, length / 2 + 1]
        power = (spectrum.real**2 + spectrum.imag**2) / (taper.square().sum() * length)
        return (power @ self._filterbank(rate, length, samples.device) + FLOOR).log()

    def _filterbank(self, rate: int, length: int, device: torch.device) -> Tensor:
        """[length / 2 + 1, bands] triangles, equally wide on the mel scale, each 1 at its centre."""
        key = (rate, device)
        if key not in self._filters:
            low, top = (2595 * math.log10(1 + hz / 700) for hz in (LOW_HZ, self.top_hz))
            corners = 700 * (10 ** (torch.linspace(low, top, self.bands + 2) / 2595) - 1)  # Hz
            bins = torch.arange(length // 2 + 1)[:, None] * (rate / length)  # Hz
            rising = (bins - corners[:-2]) / (corners[1:-1] - corners[:-2])
            falling = (corners[2:] - bins) / (corners[2:] - corners[1:-1])
            self._filters[key] = torch.minimum(rising, falling).clamp(min=0).to(device)
        return self._filters[key]


class FeatureStream:
    """Features of audio that arrives piece by piece: the pieces' features are those of the whole, cut up."""

    def __init__(self, extractor: LogMel, rate: int) -> None:
        self.extractor = extractor
        self.rate = rate
        self.pending = torch.zeros(0)  # samples from the next frame's first one on

    def accept(self, samples: Tensor) -> Tensor:
        """Features [frames, bands] of the frames that the new samples [N] complete."""
        window, hop = frame_size(self.rate)
        self.pending = torch.cat([self.pending.to(samples), samples])
        frames = max(0, (len(self.pending) - window) // hop + 1)
        features = self.extractor(self.pending, self.rate)
        self.pending = self.pending[frames * hop :]
        return features


def frame_size(rate: int) -> tuple[int, int]:
    """Window and hop in samples at a rate in Hz."""
    return round(WINDOW_SECONDS * rate), round(HOP_SECONDS * rate)


def top_frequency(rates: Iterable[int]) -> float:
    """Upper edge of the bands in Hz that suits recordings of all these sample rates: speech up to 8 kHz."""
    return min(0.95 * min(rates) / 2, 8000.0)
