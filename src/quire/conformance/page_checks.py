"""Pages of the KV cache: backends allocate and lay out what the planner asks for, and pages move to the host and back."""

import functools
from collections.abc import Sequence

import torch

from quire.attention.interface import AttentionBackend, AttentionRequest
from quire.attention.selector import load_backend
from quire.config.kv_spec import KVCacheConfig, KVCacheGroup, KVCacheSpec, KVKind
from quire.conformance.contract import NotClaimed, Subject, check, expect, with_refusals
from quire.worker.page_store import PageStore

PAGES, HOST_PAGES = 9, 6
LAYOUTS: dict[str, tuple[KVKind, ...]] = {
    "one-kind": (KVKind.FULL,),
    "windows": (KVKind.FULL, KVKind.SLIDING_WINDOW),
    "latents": (KVKind.MLA,),
    "states": (KVKind.FULL, KVKind.RECURRENT),
}


def _spec(kind: KVKind, name: str, page: int) -> KVCacheSpec:
    if kind is KVKind.RECURRENT:
        return KVCacheSpec(kind, page, 1000, dtype="float32")
    heads, planes = (1, 1) if kind is KVKind.MLA else (2, 2)
    size = planes * heads * 64 * getattr(torch, name).itemsize
    window = 24 if kind is KVKind.SLIDING_WINDOW else 0
    return KVCacheSpec(kind, page, size, heads, 64, name, window)


def check_layout(kinds: Sequence[KVKind], subject: Subject) -> str:
    """Pages of these layers are zero at first, apart from one another, and whole after a way to the host and back."""
    page, name = subject.page_size, subject.dtype_name
    groups = tuple(KVCacheGroup(_spec(kind, name, page), (number,)) for number, kind in enumerate(kinds))
    plan = KVCacheConfig(PAGES, groups, HOST_PAGES)
    names: list[str] = []
    refusals: list[str] = []
    with subject.kernels():
        for path in subject.platform.attention_backends():
            backend = load_backend(path)
            if backend.only_when_named:  # a library that may not be there
                continue
            if why := _refusal(backend, [group.spec for group in groups]):
                refusals.append(f"{backend.name}: {why}")
                continue
            names.append(backend.name)
            _check_store(PageStore(plan, backend(), subject.device), plan, backend)
    if not names:
        raise NotClaimed(with_refusals("", refusals))
    return with_refusals(f"{', '.join(names)}: {page} tokens, {plan.page_bytes} bytes a page", refusals)


def _refusal(backend: type[AttentionBackend], specs: Sequence[KVCacheSpec]) -> str:
    """Why a backend serves no layers that keep these; empty if it does."""
    for spec in specs:
        if spec.kind is KVKind.RECURRENT:
            continue
        is_latent = spec.kind is KVKind.MLA
        request = AttentionRequest(
            spec.num_kv_heads,
            spec.num_kv_heads,
            spec.head_dim,
            getattr(torch, spec.dtype),
            spec.block_size,
            window=spec.window,
            kind="mla" if is_latent else "full",
            latent=spec.head_dim if is_latent else 0,
        )
        answer = backend.supports(request)
        if not answer.yes:
            return f"{answer.why} ({request})"
    return ""


def _check_store(store: PageStore, plan: KVCacheConfig, backend: type[AttentionBackend]) -> None:
    name = backend.name
    expect(
        not any(tensor.view(torch.uint8).any() for tensor in store.tensors),
        f"new pages of backend {name!r} are not zero",
        "zeros",
        "other values",
    )
    least = PAGES * plan.page_bytes
    expect(store.num_bytes() >= least, f"backend {name!r} allocates too little", f"{least} bytes", store.num_bytes())
    layers, _ = store.by_layer()
    for layer, pages in enumerate(layers):
        is_state = plan.groups[layer].spec.kind is KVKind.RECURRENT
        _check_apart(pages, 0 if is_state else backend.page_dimension, f"layer {layer} of {name!r}")
    before = [tensor.cpu().clone() for tensor in store.tensors]
    outwards = [(3, 1), (5, 4), (8, 0)]
    store.swap_out(outwards)
    for tensor in store.tensors:
        tensor.zero_()
    store.swap_in([(host, page) for page, host in outwards])
    dimension = backend.page_dimension if plan.is_uniform else 0
    chosen = torch.tensor([page for page, _ in outwards])
    for tensor, old in zip(store.tensors, before, strict=True):
        expect(
            torch.equal(tensor.cpu().index_select(dimension, chosen), old.index_select(dimension, chosen)),
            f"pages of backend {name!r} change on their way to the host and back",
            "the same bits",
            "others",
        )


def _check_apart(pages: torch.Tensor, dimension: int, what: str) -> None:
    """Writing a page leaves the others as they are."""
    for page in range(PAGES):
        pages.select(dimension, page).fill_(page + 1)
    for page in range(PAGES):
        found = pages.select(dimension, page).float().cpu()
        expect(
            (found == page + 1).all(),
            f"pages of {what} overlap",
            f"{page + 1} in page {page}",
            found.unique().tolist()[:5],
        )


for _name, _kinds in LAYOUTS.items():
    check(f"pages/{_name}", f"pages of layers ({_name}) are zero, apart, and move to the host and back")(
        functools.partial(check_layout, _kinds)
    )
