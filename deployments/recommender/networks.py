"""Two classic recommenders: a user and an item to a score."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from .data import GENRES, GROUPS, ITEMS, USERS, features


def _mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for narrow, wide in pairwise(widths):
        layers += [nn.Linear(narrow, wide), nn.ReLU()]
    return nn.Sequential(*layers)


def _embedding(count: int, width: int) -> nn.Embedding:
    """Small at first: torch's own, of variance 1, drown what is learned in noise."""
    embedding = nn.Embedding(count, width)
    nn.init.normal_(embedding.weight, std=0.05)
    return embedding


class NCF(nn.Module):
    """Neural collaborative filtering (NeuMF; He et al., WWW 2017): the product of one pair of
    embeddings beside an MLP over another pair. 0.4 million multiplications per item."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.users, self.items = _embedding(USERS, width), _embedding(ITEMS, width)
        self.mlp_users = _embedding(USERS, 4 * width)
        self.mlp_items = _embedding(ITEMS, 4 * width)
        self.mlp = _mlp(8 * width, 512, 256, 128)
        self.score = nn.Linear(width + 128, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        """Indices, both (n,), to logits (n,)."""
        product = self.users(user) * self.items(item)
        deep = self.mlp(torch.cat([self.mlp_users(user), self.mlp_items(item)], 1))
        score: Tensor = self.score(torch.cat([product, deep], 1)).squeeze(1)
        return score


class WideAndDeep(nn.Module):
    """Wide & Deep (Cheng et al., DLRS 2016): a linear model of crossed features, which remembers,
    beside an MLP over embeddings, which generalises. 1.2 million multiplications per item."""

    group: Tensor
    genre: Tensor

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        known = features()
        for name, values in (("group", known.group), ("genre", known.genre)):
            self.register_buffer(name, torch.from_numpy(values.copy()), persistent=False)
        self.users, self.items = _embedding(USERS, 2 * width), _embedding(ITEMS, 4 * width)
        self.groups, self.genres = _embedding(GROUPS, width), _embedding(GENRES, width)
        self.mlp = _mlp(8 * width, 1024, 512, 256)
        self.score = nn.Linear(256, 1)
        self.popularity = _embedding(ITEMS, 1)
        self.crossed = _embedding(GROUPS * GENRES, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        """Indices, both (n,), to logits (n,)."""
        group, genre = self.group[user], self.genre[item]
        parts = (self.users(user), self.items(item), self.groups(group), self.genres(genre))
        deep = self.score(self.mlp(torch.cat(parts, 1)))
        wide = self.popularity(item) + self.crossed(group * GENRES + genre)
        score: Tensor = (deep + wide).squeeze(1)
        return score


NETWORKS: dict[str, type[NCF | WideAndDeep]] = {"ncf": NCF, "wide_deep": WideAndDeep}
