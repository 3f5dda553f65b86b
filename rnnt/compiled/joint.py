"""The joint network's hidden layer at the rows of one tile, and the way of its gradient back to frames and states.

    hidden[row] = dropout(activation(encoder[frame of row] + predictor[state of row]))

    d_encoder[frame]   = sum of d_pre over the frame's rows          d_pre: gradient before the activation
    d_predictor[state] = sum of d_pre over the state's rows

encoder [B T, H], predictor [B U1, H] -> hidden [rows, H] in the compute dtype; the sum and the activation are taken in
float32 (float64 stays float64).

`joint` is traced into the compiled tile, so that the gathered rows never reach memory.  Their gradient must not be
taken there: a scatter of gradients compiles to atomic additions, whose order changes from run to run.  So encoder and
predictor are constants in there, and d_pre [rows, H] is taken at a third summand, `anchor`, zeros that own no memory.

Graves et al. 2013, arXiv:1303.5778.  Before: layout.py.  After: log_probs.py.
"""

import torch
from torch import Tensor

from rnnt.dropout import keep_under_keys


def joint(
    encoder: Tensor, predictor: Tensor, anchor: Tensor | None, frame: Tensor, state: Tensor,
    key_1: Tensor, key_2: Tensor, activation: str, dropout_p: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """hidden [rows, H] in `dtype`; frame, state and the keys of dropout: [rows] int64."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    pre = encoder[frame].to(wide) + predictor[state].to(wide)
    if anchor is not None:
        pre = pre + anchor
    hidden = getattr(torch, activation)(pre)
    if dropout_p > 0:
        keep = keep_under_keys(key_1, key_2, hidden.shape[-1], dropout_p)
        hidden = torch.where(keep, hidden / (1 - dropout_p), 0)
    return hidden.to(dtype)


def matrix(x: Tensor) -> Tensor:
    """encoder [B, T, H] or predictor [B, U1, H] as a compiled tile takes it: [B T, H], of any length."""
    x = x.detach().reshape(-1, x.shape[-1])
    if x.shape[0] == 1:
        x = torch.cat([x, x])  # torch.compile makes a graph of its own for a dimension of size 1
    torch._dynamo.maybe_mark_dynamic(x, 0)
    return x


def add_rows(total: Tensor, index: Tensor, rows: Tensor) -> None:
    """total[index[i]] += rows[i] in place, in the same order at every run.

    On the CPU index_add_ does that.  On CUDA it adds atomically, and index_put_, which sorts, took two thirds of a
    whole training step; so rows are sorted by their index here, and the run of each index is summed by one thread a
    column.
    """
    if total.device.type == "cpu":
        total.index_add_(0, index, rows)
        return
    order = index.argsort(stable=True)
    runs = torch.searchsorted(index[order], torch.arange(len(total) + 1, device=index.device))
    total += torch.segment_reduce(rows[order], "sum", offsets=runs, axis=0, initial=0)
