"""Another flash attention takes the place of torch's, and packed rows run through it."""

from collections.abc import Iterator

import pytest
import torch
from torch.library import Library
from torch.nn import functional
from torch.nn.attention import (
    current_flash_attention_impl,
    register_flash_attention_impl,
    restore_flash_attention_impl,
)

from ndtrain.errors import RecipeError
from ndtrain.model.attention import describe_attention
from ndtrain.model.flash_attention import activate
from ndtrain.model.varlen import varlen_attention
from ndtrain.parallel.segments import Segments

NAME = "written out"
STARTS = torch.tensor([0, 5, 6, 12], dtype=torch.int32)


class WrittenOut:
    """Attention of each document on CPU, where torch has no flash attention of its own."""

    def __init__(self) -> None:
        self.calls = 0
        self.library: Library | None = Library("aten", "IMPL")
        self.library.impl("_flash_attention_forward", self.forward, "CPU")

    def forward(self, query, key, value, starts, _, *__, scale=None, **___):
        self.calls += 1
        output = torch.empty_like(query)
        for first, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
            parts = (part[first:end].transpose(0, 1) for part in (query, key, value))
            one = functional.scaled_dot_product_attention(*parts, is_causal=True, scale=scale)
            output[first:end] = one.transpose(0, 1)
        empty = query.new_empty(0)
        sums = query.new_zeros(query.shape[1], query.shape[0], dtype=torch.float32)
        return output, sums, empty.to(torch.uint64), empty.to(torch.uint64), empty

    def remove(self) -> None:
        self.library = None


@pytest.fixture
def implementation() -> Iterator[list[WrittenOut]]:
    made: list[WrittenOut] = []

    def register() -> WrittenOut:
        made.append(WrittenOut())
        return made[-1]

    register_flash_attention_impl(NAME, register_fn=register)
    yield made
    restore_flash_attention_impl()


def test_packed_rows_run_through_the_implementation_that_was_activated(
    implementation: list[WrittenOut],
) -> None:
    activate(NAME)
    assert current_flash_attention_impl() == NAME
    torch.manual_seed(0)
    query, key, value = (torch.randn(12, 2, 8) for _ in range(3))
    segments = Segments(STARTS, STARTS, 6, 6)
    found = varlen_attention(query, key, value, segments, window=-1, scaling=0.5)
    assert implementation[0].calls == 1
    document = torch.bucketize(torch.arange(12), STARTS[1:], right=True)
    mask = (document[:, None] == document).tril()
    heads = (part.transpose(0, 1) for part in (query, key, value))
    wanted = functional.scaled_dot_product_attention(*heads, attn_mask=mask, scale=0.5)
    torch.testing.assert_close(found, wanted.transpose(0, 1))


@pytest.mark.parametrize("name", ["FA3", "FA4", "FA9"])
def test_what_is_not_installed_is_said_with_its_package(name: str) -> None:
    with pytest.raises(RecipeError, match=f"{name} cannot be used here") as caught:
        activate(name)
    assert caught.value.where == "flash_attention_impl"
    assert "Install" in str(caught.value.hint)


def test_the_line_on_attention_names_it() -> None:
    said = describe_attention(fused=True, windows=(), flash="FA3")
    assert "FA3's kernel for documents of variable length" in said
    assert "its kernel for documents" in describe_attention(fused=True, windows=())
