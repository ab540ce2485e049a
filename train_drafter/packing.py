"""Packing documents into rows of one length, and the order in which training takes the rows.

A row holds several documents. Nothing passes from one to the next: each begins with an empty state and an empty window
of the convolution (``starts`` of ``hidden_states``), and the drafter's pairs attend to their own document only. A
document longer than a row is cut, and each piece is read as a text of its own, from an empty state: the target gives
its features and its distributions for just that text, so nothing misleads the drafter.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Int
from numpy import ndarray

from train_drafter.documents import Documents


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Rows of documents.

    Attributes:
      tokens: [B, T] int32.
      positions: [B, T] int32. Place in the document, 0 at its first token. Padding is a document of its own.
      counted: [B, T] bool. Whether the prediction made at this place, of the token after it, is learned.
    """

    tokens: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    counted: Bool[Array, "B T"]

    @property
    def starts(self) -> Bool[Array, "B T"]:
        """[B, T] bool. First tokens of documents."""
        return self.positions == 0


@dataclass(frozen=True)
class Rows:
    """Pieces of documents assigned to rows, at most ``length`` tokens each.

    Attributes:
      documents: what the pieces are cut from.
      length: of a row.
      pieces: [P, 2] int64. [start, stop) of each piece in the documents' tokens, by row.
      bounds: [R + 1] int64. The pieces of row r are ``pieces[bounds[r] : bounds[r + 1]]``.
    """

    documents: Documents
    length: int
    pieces: Int[ndarray, "P 2"]
    bounds: Int[ndarray, " R+1"]

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def batch(self, rows: Int[ndarray, " B"]) -> Batch:
        """The given rows."""
        tokens = np.zeros((len(rows), self.length), np.int32)
        positions = np.tile(np.arange(self.length, dtype=np.int32), (len(rows), 1))
        counted = np.zeros((len(rows), self.length), bool)
        for i, row in enumerate(rows):
            at = 0
            for start, stop in self.pieces[self.bounds[row] : self.bounds[row + 1]]:
                end = at + stop - start
                tokens[i, at:end] = self.documents.tokens[start:stop]
                counted[i, at : end - 1] = self.documents.learned[start + 1 : stop]
                positions[i, at:] = np.arange(self.length - at)
                at = end
            positions[i, at:] = np.arange(self.length - at)
        arrays: Any = tokens, positions, counted  # go to the devices when they are known
        return Batch(*arrays)


def pack(documents: Documents, length: int) -> Rows:
    """Cuts and packs all documents: the longest piece first, each into the fullest row that still takes it."""
    pieces = []
    for first, stop in zip(documents.starts[:-1].tolist(), documents.starts[1:].tolist()):
        cuts = [(start, min(start + length, stop)) for start in range(first, stop, length)]
        # Only pieces that hold a prediction; a last piece of one token has none.
        pieces += [(start, end) for start, end in cuts if documents.learned[start + 1 : end].any()]
    pieces.sort(key=lambda piece: (piece[0] - piece[1], piece[0]))

    rows: list[list[tuple[int, int]]] = []
    by_room: list[list[int]] = [[] for _ in range(length + 1)]  # rows by the tokens they still take
    rooms = 0  # bit r says that by_room[r] is not empty
    for start, stop in pieces:
        need = stop - start
        fitting = rooms >> need
        if fitting:
            room = need + (fitting & -fitting).bit_length() - 1
            row = by_room[room].pop()
            rooms ^= (not by_room[room]) << room
        else:
            room, row = length, len(rows)
            rows.append([])
        rows[row].append((start, stop))
        by_room[room - need].append(row)
        rooms |= 1 << (room - need)
    flat = np.array([piece for row in rows for piece in row], np.int64).reshape(-1, 2)
    return Rows(documents, length, flat, np.cumsum([0, *map(len, rows)]))


@dataclass(frozen=True)
class RowSampler:
    """Batches as a pure function of (seed, step), so that a resumed run needs only its step.

    Every epoch takes each row once, in an order of its own.
    """

    rows: Rows
    batch: int
    seed: int

    def __call__(self, step: int) -> Batch:
        places = step * self.batch + np.arange(self.batch)
        count = len(self.rows)
        return self.rows.batch(np.array([_order(self.seed, p // count, count)[p % count] for p in places.tolist()]))


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, count: int) -> Int[ndarray, " count"]:
    return np.random.default_rng([seed, epoch]).permutation(count)
