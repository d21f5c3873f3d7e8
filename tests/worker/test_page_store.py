"""Pages of layers that keep different things share tensors, and move whole."""

import pytest
import torch

from quire.attention.reference import ReferenceBackend
from quire.config.kv_spec import KVCacheConfig, KVCacheGroup, KVCacheSpec, KVKind
from quire.worker.page_store import PageStore

FULL = KVCacheSpec(KVKind.FULL, 16, 2 * 2 * 8 * 4, num_kv_heads=2, head_dim=8, dtype="float32")
WIDE = KVCacheSpec(KVKind.SLIDING_WINDOW, 16, 2 * 1 * 24 * 4, num_kv_heads=1, head_dim=24, dtype="float32", window=32)
LATENT = KVCacheSpec(KVKind.MLA, 16, 20 * 4, num_kv_heads=1, head_dim=20, dtype="float32")
STATE = KVCacheSpec(KVKind.RECURRENT, 16, 1000)
CPU = torch.device("cpu")


def make_store(*specs: KVCacheSpec, layers: int = 2) -> PageStore:
    groups = tuple(
        KVCacheGroup(spec, tuple(range(number * layers, (number + 1) * layers))) for number, spec in enumerate(specs)
    )
    return PageStore(KVCacheConfig(5, groups, num_host_blocks=3), ReferenceBackend(), CPU)


def test_layers_that_are_alike_have_tensors_of_their_own_form():
    store = make_store(FULL, KVCacheSpec(KVKind.SLIDING_WINDOW, 16, 128, num_kv_heads=4, head_dim=4, dtype="float32"))
    layers, groups = store.by_layer()
    assert [layer.shape for layer in layers] == [(2, 5, 2, 16, 8)] * 2 + [(2, 5, 4, 16, 4)] * 2
    assert all(layer.is_contiguous() for layer in layers)
    assert groups == [0, 0, 1, 1] and store.num_bytes() == 2 * 5 * FULL.page_bytes


@pytest.mark.parametrize("specs", [(FULL, WIDE), (WIDE, LATENT, STATE), (LATENT,), (STATE,)])
def test_a_page_that_one_layer_fills_changes_no_other_page(specs):
    store = make_store(*specs)
    most = max(spec.page_bytes for spec in specs)
    assert store.num_bytes() == 2 * 5 * (-(-most // 64) * 64)
    layers, groups = store.by_layer()
    for number, group in enumerate(groups):
        pages = layers[number]
        tensor = store.tensors[number % 2]
        tensor.zero_()
        if specs[group].kind is KVKind.RECURRENT:
            assert pages.shape == (5, tensor.shape[1]) and pages.dtype == torch.uint8
            pages[3] = 1
        else:
            assert pages.shape == (2, 5, specs[group].num_kv_heads, 16, specs[group].head_dim)
            pages[0, 3], pages[1, 3] = 1.0, 1.0
        filled = [int(page.count_nonzero()) for page in tensor.view(pages.dtype)]
        values = tensor.shape[1] if pages.dtype == torch.uint8 else specs[group].page_bytes // 4
        assert filled == [0, 0, 0, values, 0]


def test_layers_that_lie_side_by_side_in_a_tensor_share_no_byte():
    groups = (KVCacheGroup(WIDE, (0, 1)), KVCacheGroup(LATENT, (2, 3, 4), per_tensor=2))
    store = PageStore(KVCacheConfig(5, groups), ReferenceBackend(), CPU)
    layers, _ = store.by_layer()
    assert [tensor.shape for tensor in store.tensors] == [
        (5, WIDE.page_bytes)
    ] * 2 and 2 * LATENT.page_bytes < WIDE.page_bytes
    for number, layer in enumerate(layers[2:], 1):
        layer[0, 3] = number
    assert [int((layer[0] == number).sum()) for number, layer in enumerate(layers[2:], 1)] == [16 * 20] * 3
    assert [int(tensor[4].count_nonzero()) for tensor in store.tensors] == [0, 0]


def test_latent_pages_hold_keys_that_are_values():
    layers, _ = make_store(LATENT).by_layer()
    layers[0][0, 2, 0, 5] = torch.arange(20.0)
    assert torch.equal(layers[0][1, 2, 0, 5], torch.arange(20.0))


@pytest.mark.parametrize("specs", [(FULL,), (FULL, STATE), (LATENT, WIDE)])
def test_pages_are_swapped_whole(specs):
    store = make_store(*specs)
    for number, tensor in enumerate(store.tensors):
        pages = tensor.movedim(store._page_dimension, 0)
        for page in range(5):
            pages[page] = page + 10 * number

    def contents() -> list[list[float]]:
        moved = [tensor.movedim(store._page_dimension, 0).flatten(1) for tensor in store.tensors]
        assert all((pages == pages[:, :1]).all() for pages in moved)
        return [pages[:, 0].tolist() for pages in moved]

    store.swap_out([(3, 0), (1, 2)])
    store.swap_in([(2, 4), (0, 1)])
    assert contents() == [[0, 3, 2, 3, 1], [10, 13, 12, 13, 11]]
