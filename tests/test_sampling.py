"""Sampling against plain numpy definitions, draws against their distribution, and the independence of requests."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemotron_mamba2.errors import NemotronMamba2Error, RequestError, ShapeError
from nemotron_mamba2.sampling import SamplingParams, gumbel_noise, sample
from nemotron_mamba2.sampling import _filtered as filtered


def one(logits, sampling, *, position=0, history=None):
    """Sample a single row; returns the token."""
    histories = None if history is None else [history]
    return sample(logits[None], [sampling], positions=[position], histories=histories).tokens.item()


def kept_by_definition(logits, sampling):
    """Which tokens survive, written the slow way in float64."""
    scaled = logits.astype(np.float64) / sampling.temperature
    order = np.argsort(-scaled, kind="stable")
    k = min(sampling.top_k or len(scaled), len(scaled))
    largest = scaled[order[:k]]
    if sampling.top_p is not None and sampling.top_p < 1:
        weight = np.exp(largest - largest[0])
        share = weight / weight.sum()
        reached = 0.0
        for count, part in enumerate(share, 1):
            reached += part
            if reached >= sampling.top_p:
                largest = largest[:count]
                break
    kept = scaled >= largest[-1]
    if sampling.min_p:
        probability = np.exp(scaled - scaled.max())
        kept &= probability >= sampling.min_p
    return kept


samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.25, 0.7, 1.0, 3.0]),
    top_k=st.none() | st.integers(1, 70),
    top_p=st.none() | st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.none() | st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    seed=st.integers(0, 2**63 - 1),
)


def distinct_logits(seed, rows, vocab_size):
    """Random rows whose values are never so near that rounding could order them differently."""
    generator = np.random.default_rng(seed)
    steps = np.stack([generator.permutation(vocab_size) for _ in range(rows)])
    return torch.from_numpy((steps * 0.13 - 3 + 0.01 * generator.random()).astype(np.float32))


@given(st.integers(0, 2**32 - 1), st.lists(samplings, min_size=1, max_size=5))
def test_filters_keep_what_their_definitions_keep(seed, requests):
    logits = distinct_logits(seed, len(requests), 64)
    kept = torch.isfinite(filtered(logits, requests)).numpy()
    for row, request in enumerate(requests):
        np.testing.assert_array_equal(kept[row], kept_by_definition(logits[row].numpy(), request), str(request))


@given(st.integers(0, 2**32 - 1), st.lists(samplings, min_size=2, max_size=6), st.integers(0, 10**6))
def test_a_draw_does_not_depend_on_its_batch_mates(seed, requests, position):
    logits = distinct_logits(seed, len(requests), 50)
    positions = [position + row for row in range(len(requests))]
    together = sample(logits, requests, positions=positions).tokens
    backwards = sample(logits.flip(0), requests[::-1], positions=positions[::-1]).tokens.flip(0)
    alone = [one(logits[row], request, position=positions[row]) for row, request in enumerate(requests)]
    assert together.tolist() == backwards.tolist() == alone


@given(st.integers(0, 2**32 - 1), samplings)
def test_the_drawn_token_survived_the_filters(seed, request):
    logits = distinct_logits(seed, 1, 40)
    token = one(logits[0], request)
    assert kept_by_definition(logits[0].numpy(), request)[token]


@given(
    st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=40),
    st.lists(st.integers(0, 39), max_size=80),
    st.floats(0.1, 5.0),
)
def test_repetition_penalty_by_its_definition(values, history, penalty):
    history = [token % len(values) for token in history]
    expected = np.array(values, dtype=np.float32)
    for token in set(history):
        value = expected[token]
        expected[token] = value / np.float32(penalty) if value > 0 else value * np.float32(penalty)
    logits = torch.tensor(values, dtype=torch.float32)
    before = logits.clone()
    token = one(logits, SamplingParams(repetition_penalty=penalty), history=history)
    assert token == int(np.argmax(expected))
    assert torch.equal(logits, before)


def test_greedy_takes_the_lowest_id_among_equals():
    logits = torch.tensor([[1.0, 5.0, 5.0, 5.0], [2.0, 2.0, 2.0, 2.0]])
    tokens = sample(logits, [SamplingParams()] * 2, positions=[0, 0]).tokens
    assert tokens.tolist() == [1, 0]


def test_greedy_and_drawn_rows_share_a_batch(generator):
    logits = torch.randn(4, 100, generator=generator)
    drawn = SamplingParams(temperature=1.0, seed=1)
    tokens = sample(logits, [SamplingParams(), drawn, SamplingParams(), drawn], positions=[3, 4, 5, 6]).tokens
    assert tokens[::2].tolist() == logits[::2].argmax(-1).tolist()
    assert tokens[1] == one(logits[1], drawn, position=4)


def test_no_sequences_give_no_tokens():
    assert sample(torch.empty(0, 10), [], positions=[]).tokens.tolist() == []


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e30])
def test_extreme_temperatures_stay_finite(temperature):
    logits = torch.tensor([-3e38, 3e38, 0.0, -math.inf])
    token = one(logits, SamplingParams(temperature=temperature, seed=3, top_p=0.9))
    assert token in ((1,) if temperature < 1 else (0, 1, 2))


def chi_square(counts, probabilities):
    expected = counts.sum() * probabilities
    return float(((counts - expected) ** 2 / expected).sum())


# 99.9 % points of the chi-square distribution with 7 degrees of freedom is 24.3; seeds are fixed, so this never flakes.
@pytest.mark.parametrize("across", ["positions", "seeds"])
def test_draws_follow_the_distribution(across):
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5, 2.0, -2.0, 0.3, 1.2])
    draws, temperature = 20_000, 0.8
    numbers = range(draws)
    requests = [SamplingParams(temperature=temperature, seed=i if across == "seeds" else 7) for i in numbers]
    positions = [0] * draws if across == "seeds" else list(numbers)
    tokens = sample(logits.expand(draws, -1), requests, positions=positions).tokens
    counts = np.bincount(tokens.numpy(), minlength=8)
    assert chi_square(counts, torch.softmax(logits / temperature, -1).double().numpy()) < 24.3


def test_draws_follow_the_distribution_that_filters_leave():
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5, 2.0, -2.0, 0.3, 1.2])
    draws = 20_000
    tokens = sample(
        logits.expand(draws, -1),
        [SamplingParams(temperature=1.0, top_k=3, seed=11)] * draws,
        positions=list(range(draws)),
    ).tokens
    counts = np.bincount(tokens.numpy(), minlength=8)
    assert set(np.flatnonzero(counts)) == {1, 4, 7}
    share = torch.softmax(logits[[1, 4, 7]], -1).double().numpy()
    assert chi_square(counts[[1, 4, 7]], share) < 13.8  # 99.9 %, 2 degrees of freedom


def test_noise_is_gumbel_and_uncorrelated_between_neighbours():
    noise = gumbel_noise([5] * 64, list(range(64)), vocab_size=4096)
    assert noise.dtype == torch.float64
    assert torch.isfinite(noise).all()
    assert abs(noise.mean().item() - 0.5772) < 0.01
    assert abs(noise.var().item() - math.pi**2 / 6) < 0.02
    centred = (noise - noise.mean()) / noise.std()
    for shifted in (centred[:, 1:] * centred[:, :-1], centred[1:] * centred[:-1]):
        assert abs(shifted.mean().item()) < 0.01
    other_seed = gumbel_noise([6] * 64, list(range(64)), vocab_size=4096)
    assert abs((centred * (other_seed - other_seed.mean())).mean().item()) < 0.01


def test_seeds_are_drawn_once_per_request_and_kept():
    unseeded = SamplingParams(temperature=1.0)
    first, second = unseeded.seeded(), unseeded.seeded()
    assert first.seed is not None and first.seed != second.seed
    assert first.seeded() is first
    assert SamplingParams(seed=0).seeded().seed == 0


def test_logprobs_are_the_models_own(generator):
    logits = torch.randn(3, 30, generator=generator)
    requests = [
        SamplingParams(temperature=2.0, top_k=2, repetition_penalty=3.0, seed=4, logprobs=2),
        SamplingParams(),
        SamplingParams(logprobs=0),
    ]
    result = sample(logits, requests, positions=[0, 0, 0], histories=[[1, 2], [], []])
    expected = torch.log_softmax(logits.double(), -1)
    torch.testing.assert_close(result.logprobs.double(), expected.gather(-1, result.tokens[:, None])[:, 0])
    values, ids = expected.topk(2)
    assert torch.equal(result.top_tokens, ids)
    torch.testing.assert_close(result.top_logprobs.double(), values)


def test_logprobs_are_absent_unless_asked_for():
    result = sample(torch.zeros(1, 4), [SamplingParams()], positions=[0])
    assert result.logprobs is None and result.top_tokens is None and result.top_logprobs is None


def test_more_logprobs_than_tokens_gives_all():
    result = sample(torch.zeros(1, 4), [SamplingParams(logprobs=20)], positions=[0])
    assert result.top_tokens.shape == (1, 4)


@pytest.mark.parametrize("request_", [SamplingParams(), SamplingParams(temperature=1.0, top_p=0.5, seed=1)])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_damaged_logits_are_reported_by_row(request_, bad):
    logits = torch.zeros(3, 8)
    logits[1, 5] = bad
    result = sample(logits, [request_] * 3, positions=[0] * 3)
    assert result.finite.tolist() == [True, False, True]
    with pytest.raises(NemotronMamba2Error, match="sequence 1 of 3"):
        result.raise_if_not_finite()


def test_nothing_but_minus_infinity_is_reported():
    result = sample(torch.full((1, 4), -math.inf), [SamplingParams(temperature=1.0, seed=1)], positions=[0])
    assert result.finite.tolist() == [False]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("top_k", 0),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.01),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("seed", -1),
        ("seed", 2**63),
        ("logprobs", -1),
        ("stop", ("a", "")),
        ("stop", (1,)),
        ("stop_token_ids", (-1,)),
    ],
)
def test_values_out_of_range_are_refused_by_name(field, value):
    with pytest.raises(RequestError, match=rf"^{field}: expected .*, came ") as caught:
        SamplingParams(**{field: value})
    assert "\n" not in str(caught.value)


def test_stop_takes_one_string_or_a_list():
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[3]).stop == ("a", "b")
    assert SamplingParams(stop_token_ids=[3]).stop_token_ids == (3,)


def test_lengths_that_do_not_fit_are_refused():
    logits = torch.zeros(2, 4)
    with pytest.raises(ShapeError, match="sampling"):
        sample(logits, [SamplingParams()], positions=[0, 0])
    with pytest.raises(ShapeError, match="positions"):
        sample(logits, [SamplingParams()] * 2, positions=[0])
    with pytest.raises(ShapeError, match="histories"):
        sample(logits, [SamplingParams(repetition_penalty=1.1)] * 2, positions=[0, 0])
    with pytest.raises(ShapeError, match="float32"):
        sample(logits.bfloat16(), [SamplingParams()] * 2, positions=[0, 0])


@pytest.mark.gpu
def test_the_device_draws_what_the_host_draws_and_never_waits(generator):
    logits = torch.randn(8, 5000, generator=generator)
    requests = [
        SamplingParams(temperature=0.9, top_k=50, top_p=0.95, min_p=0.01, seed=i, repetition_penalty=1.2, logprobs=3)
        for i in range(8)
    ]
    arguments = {"positions": list(range(8)), "histories": [[i, i + 1] for i in range(8)]}
    expected = sample(logits, requests, **arguments)
    on_device = logits.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = sample(on_device, requests, **arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert result.tokens.tolist() == expected.tokens.tolist()
    torch.testing.assert_close(result.logprobs.cpu(), expected.logprobs)
