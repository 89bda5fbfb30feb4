"""The weights that `helper` begins with: two layers that copy, and small random numbers everywhere else.

A transformer learns to copy late, because two layers must work together before either is of use: one that notes for
each token which token stands before it, and one that looks for the notes that equal the current token and reads what
follows (an induction head: Olsson et al., "In-context Learning and Induction Heads", 2022). Training a network of this
size until it finds them takes more tokens than all the rest. So it begins with them, and the training changes them as
it changes every weight.

The width is divided into parts. At first, embeddings use TOKEN alone; layer 0 writes the previous token into BEFORE and
the one before that into EARLIER. In layer 1, a head looks for the token that stood after the current one when it last
came, another for the one that came after the current pair of tokens. Both write it into TOKEN, where the output layer
reads it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .network import THETA, Network

TOKEN_STD = 0.055  # of an embedding's numbers
SHARPNESS = 1.5  # weights of the norms of q and k: scores of equal tokens become about 11 * SHARPNESS^2
NOTE = 0.06  # how strongly the previous tokens are noted
COPY = 0.3  # how strongly a copied token counts
FAST = 12  # pairs of a head that tell positions apart: those that rotate fastest
SLOW_ANGLE = 0.3  # a pair is slow if it rotates less than this over the distances that matter
DISTANCE = 256


def prepare(network: Network) -> None:
    """Write the circuit into the first two layers of a network with random weights."""
    shape = network.shape
    head, width = shape.head, shape.width
    if shape.layers < 2 or shape.kv_heads < 2 or shape.heads < 2 * shape.kv_heads or width < 4 * head:
        raise ValueError(f"the circuit needs 2 layers, 2 groups of 2 heads, and a width of {4 * head}")
    token, before, earlier = slice(0, 2 * head), slice(2 * head, 3 * head), slice(3 * head, 4 * head)
    constant = 0  # every embedding has the same number here, from which layer 0 makes its q and k
    with torch.no_grad():
        embedding = network.model["embed_tokens"].weight
        embedding[:, token].normal_(std=TOKEN_STD)
        embedding[:, token.stop :] = 0.0
        embedding[:, constant] = 8 * TOKEN_STD
        read = _orthogonal(head, 2 * head)  # of a token's part: what is noted of it, and copied
        read[:, constant] = 0.0
        first, second = (network.model["layers"][number].self_attn for number in (0, 1))
        for attention in (first, second):
            attention.q_norm.weight[:] = attention.k_norm.weight[:] = SHARPNESS
        # Layer 0, first group: q and k are the same for all tokens. Heads look 1 and 2 positions back.
        for weight, place in _group(first, head):
            weight[place] = 0.0
        first.k_proj.weight[:head, constant] = _fast(head, 0)
        for number in (0, 1):
            first.q_proj.weight[number * head : (number + 1) * head, constant] = _fast(head, -1 - number)
        first.v_proj.weight[:head, token] = read
        for number, part in enumerate((before, earlier)):
            columns = slice(number * head, (number + 1) * head)
            first.o_proj.weight[part, columns] = NOTE * torch.eye(head)
        # Layer 1, first group: k is the two tokens before a position; q of the first head is the current token, of the
        # second the current one and the one before it.
        for weight, place in _group(second, head):
            weight[place] = 0.0
        near, far = _slow(head)
        pick = _orthogonal(len(near), head)
        other = _orthogonal(len(far), head)
        second.k_proj.weight[near, before] = pick
        second.k_proj.weight[far, earlier] = other
        second.q_proj.weight[near, token] = pick @ read
        second.q_proj.weight[[head + i for i in near], token] = pick @ read
        second.q_proj.weight[[head + i for i in far], before] = other
        second.v_proj.weight[:head, token] = read
        for number in (0, 1):
            second.o_proj.weight[token, number * head : (number + 1) * head] = COPY * read.T


def hold(network: Network) -> None:
    """Set the gradients of the circuit to 0, so that an update does not change it."""
    for attention in (network.model["layers"][number].self_attn for number in (0, 1)):
        for weight, place in _group(attention, network.shape.head):
            if weight.grad is not None:
                weight.grad[place] = 0.0
        for norm in (attention.q_norm, attention.k_norm):
            if norm.weight.grad is not None:
                norm.weight.grad.zero_()


def _group(attention: Any, head: int) -> list[tuple[Tensor, Any]]:
    """The weights of the first group of heads: matrices and places in them."""
    return [
        (attention.q_proj.weight, slice(2 * head)),
        (attention.k_proj.weight, slice(head)),
        (attention.v_proj.weight, slice(head)),
        (attention.o_proj.weight, (slice(None), slice(2 * head))),
    ]


def _orthogonal(rows: int, columns: int) -> Tensor:
    """Random orthonormal rows."""
    return torch.linalg.qr(torch.randn(columns, rows))[0].T.contiguous()


def _fast(head: int, turns: int) -> Tensor:
    """A vector with its weight on the fastest pairs, rotated as `turns` positions rotate it."""
    angles = turns * THETA ** (-2.0 * torch.arange(head // 2) / head)
    weight = (torch.arange(head // 2) < FAST).float()
    return torch.cat((weight * angles.cos(), weight * angles.sin()))


def _slow(head: int) -> tuple[list[int], list[int]]:
    """Two halves of the dimensions whose pairs hardly rotate."""
    half = head // 2
    first = math.ceil(math.log(DISTANCE / SLOW_ANGLE) / math.log(THETA) * half)
    pairs = list(range(min(first, half - 2), half))
    near, far = pairs[::2], pairs[1::2]
    return near + [i + half for i in near], far + [i + half for i in far]
