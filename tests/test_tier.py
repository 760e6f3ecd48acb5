import pytest

from graphlin.tier import Tier, ladder


@pytest.mark.parametrize("tokens, seqs, chunk_size, chunks", [
    (4096, 32, 64, 95), (64, 1, 64, 1), (65, 1, 64, 2), (3, 8, 16, 3), (128, 128, 16, 128), (129, 128, 16, 128),
    (144, 128, 16, 129)])
def test_max_chunks_is_the_exact_bound(tokens, seqs, chunk_size, chunks):
    assert Tier(tokens, seqs, chunk_size).max_chunks == chunks


def test_max_chunks_is_reached_and_never_passed():
    tier = Tier(12, 3, 16)

    def chunks(*lengths):
        return sum(-(-n // 16) for n in lengths)
    assert tier.max_chunks == max(chunks(a, b, 12 - a - b) for a in range(13) for b in range(13 - a))


def test_fits_by_both_counts():
    tier = Tier(tokens=32, seqs=4)
    assert tier.fits(32, 4) and tier.fits(0, 1)
    assert not tier.fits(33, 1)
    assert not tier.fits(1, 5)


@pytest.mark.parametrize("arguments, error, message", [
    (dict(tokens=-1, seqs=4), ValueError, "Tier tokens: expected at least 1, found -1"),
    (dict(tokens=8, seqs=0), ValueError, "Tier seqs: expected at least 1, found 0"),
    (dict(tokens=8, seqs=1, chunk_size=48), ValueError, r"Tier chunk_size: expected one of \(16, 32, 64\), found 48"),
    (dict(tokens=8.0, seqs=1), TypeError, "Tier tokens: expected an int, found 8.0 of type float"),
    (dict(tokens=8, seqs=True), TypeError, "Tier seqs: expected an int"),
])
def test_wrong_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        Tier(**arguments)


def test_is_a_value():
    assert Tier(8, 2) == Tier(8, 2, 64)
    assert len({Tier(8, 2), Tier(8, 2), Tier(8, 2, 32)}) == 2


def test_a_ladder_shares_the_chunk_size():
    assert ladder(4096, 32) == (Tier(4096, 32), Tier(2048, 16), Tier(1024, 8), Tier(512, 4))
    assert ladder(300, 3, chunk_size=16) == (Tier(300, 3, 16),)
    assert ladder(9, 3, smallest=1, factor=3) == (Tier(9, 3), Tier(3, 1), Tier(1, 1))


@pytest.mark.parametrize("arguments, message", [
    (dict(factor=1), "ladder factor: expected an int of at least 2, found 1"),
    (dict(smallest=0), "ladder smallest: expected an int of at least 1, found 0"),
    (dict(smallest=2.5), "ladder smallest: expected an int"),
    (dict(chunk_size=65), "Tier chunk_size"),
])
def test_a_wrong_ladder_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        ladder(**(dict(tokens=64, seqs=4) | arguments))
