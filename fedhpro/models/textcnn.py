"""A CNN over word embeddings: the strongest response of each n-gram filter is a feature."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Net, Spec

KERNELS, FILTERS = (3, 4, 5), 100  # at most data/batches.py's WINDOW


class TextCNN(Net):
    """Takes int64 token ids [n, length], 0 being padding; a text has at least five tokens, padding included."""

    no_stages = "textcnn has one layer of convolutions side by side, hence no stages"

    def __init__(self, spec: Spec) -> None:
        if spec.vocab is None:
            raise ValueError("textcnn needs vocab, the number of token ids")
        super().__init__(spec, natural=FILTERS * len(KERNELS), dropout=0.8)
        hidden = 32 if spec.width is None else spec.width
        self.embedding = nn.Embedding(spec.vocab, hidden, padding_idx=0)
        self.convs = nn.ModuleList(nn.Conv1d(hidden, FILTERS, kernel) for kernel in KERNELS)

    def trunk(self, x: Tensor, with_depths: bool = True) -> tuple[list[Tensor], Tensor]:
        words: Tensor = self.embedding(x).transpose(1, 2)
        return [], torch.cat([F.relu(conv(words)).amax(2) for conv in self.convs], 1)
