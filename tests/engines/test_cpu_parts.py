"""How work is parted among the threads: none waits long for another, whatever the shapes."""

import pytest

from cutaway.engines.cpu import attend, products
from cutaway.engines.cpu.processor import FEW, MIX_STEP, UNDIVIDED

THREADS = pytest.mark.parametrize("threads", [1, 2, 3, 4, 16])


@THREADS
@pytest.mark.parametrize("d_out", [1, 64, 192, 576, 1536, 49152])
@pytest.mark.parametrize("rows", [1, 5, 64, 512])
def test_no_thread_has_more_of_a_product_to_do_than_an_even_share(threads, d_out, rows, monkeypatch):
    monkeypatch.setattr(products, "thread_count", lambda: threads)
    parts = products.parts_of.__wrapped__(d_out, 576, rows)
    groups = -(-d_out // (4 if rows <= FEW else UNDIVIDED))
    assert 1 <= parts <= products.PARTS * threads
    if parts >= threads:  # else it is too little work for all of them
        assert -(-parts // threads) * -(-groups // parts) <= -(-groups // threads)


@THREADS
@pytest.mark.parametrize("key_heads", [1, 2, 3, 8])
@pytest.mark.parametrize("width", [16, 64, 80, 128])
@pytest.mark.parametrize("keys", [10, 2000, 100_000])
def test_a_single_rows_mix_is_shared_out_evenly_where_that_can_be(threads, key_heads, width, keys, monkeypatch):
    monkeypatch.setattr(attend, "thread_count", lambda: threads)
    parts = attend.mix_parts(3 * key_heads * keys * width, key_heads, 1, width)
    stretches = key_heads * -(-width // MIX_STEP)
    assert 1 <= parts <= 4 * threads
    if parts >= threads and stretches % threads == 0:
        assert stretches % parts == 0
