"""What a block pool has to give, read from the list that it keeps."""

from quire.core.block_pool import BlockPool


def free_blocks(pool: BlockPool) -> list[int]:
    """The free pages in the order of reuse."""
    following = pool._next
    blocks: list[int] = []
    block = following[0]
    while block:
        blocks.append(block)
        block = following[block]
    return blocks
