"""The hybrid policy: what it refuses, its presets, its layers, and how it is written in one line."""

from dataclasses import replace

import pytest

from jaxinfer.configs.attention import PRESETS, Dense, Hybrid, automatic_policy, parse_policy


def test_presets_are_policies():
    assert set(PRESETS) == {"fast", "balanced", "accurate"}
    for name, policy in PRESETS.items():
        assert parse_policy(name) == policy and hash(policy) == hash(parse_policy(name))
    assert parse_policy("hybrid") == PRESETS["balanced"] == Hybrid()
    assert parse_policy("dense") == Dense()
    budgets = [policy.retrieve_blocks + policy.hot_blocks for policy in PRESETS.values()]
    assert budgets == [14, 18, 56]


def test_automatic_is_dense_up_to_the_crossover():
    assert automatic_policy(1 << 20, None) == automatic_policy(65536, 65536) == Dense()
    policy = automatic_policy(65537, 65536)
    assert policy == replace(PRESETS["balanced"], dense_below=65536)


def test_changes_in_one_line():
    policy = parse_policy("fast:window=2048, retrieve_blocks=8,retrieve_mass=0.9,anchor_boundaries=false")
    assert isinstance(policy, Hybrid)
    assert (policy.window, policy.retrieve_mass, policy.anchor_boundaries, policy.group) == (2048, 0.9, False, 8)
    assert (policy.min_retrieved, policy.max_retrieved) == (4, 16)


@pytest.mark.parametrize(
    ("text", "heads", "probes", "voters"),
    [
        ("balanced", 128, 4, 32),
        ("balanced", 16, 8, 16),
        ("balanced", 4, 32, 4),
        ("fast", 4, 8, 4),
        ("hybrid:query_block=128", 2, 32, 2),
        ("hybrid:query_block=128,probes=64", 2, 64, 2),
        ("hybrid:query_block=8,hot_epoch=256", 2, 8, 2),
    ],
)
def test_fewer_heads_have_more_probes(text: str, heads: int, probes: int, voters: int):
    policy = parse_policy(text)
    assert isinstance(policy, Hybrid)
    policy = policy.for_model(heads, 576)
    assert (policy.probes, policy.voters) == (probes, voters) and policy.for_model(heads, 576) == policy


def test_layers_of_their_own():
    policy = parse_policy("hybrid:0-2=dense,4.retrieve_blocks=48,4.candidates=80,window=1024,6-7.window=2048")
    assert isinstance(policy, Hybrid)
    kinds = [policy.of_layer(layer) for layer in range(9)]
    assert kinds[0] == kinds[2] == Dense()
    assert kinds[3] == kinds[5] == kinds[8] == parse_policy("hybrid:window=1024")
    assert kinds[4] == parse_policy("hybrid:window=1024,retrieve_blocks=48,candidates=80")
    assert kinds[6] == kinds[7] == Hybrid(window=2048)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sparse", "expected an attention policy"),
        ("hybrid:", "expected an attention policy"),
        ("dense:window=3", "expected an attention policy"),
        ("hybrid:budget=3", "expected a field of the hybrid policy"),
        ("hybrid:layers=3", "expected a field of the hybrid policy"),
        ("hybrid:window", "expected field=value"),
        ("hybrid:window=many", "expected window to be an integer, got 'many'"),
        ("hybrid:retrieve_mass=much", "expected retrieve_mass to be a number, got 'much'"),
        ("hybrid:anchor_boundaries=2", "expected anchor_boundaries to be true or false"),
        ("hybrid:3-1=dense", "expected layers such as 3 or 0-3"),
        ("hybrid:1=sparse", "expected 1=dense"),
        ("hybrid:1=dense,1.window=5", "layers 1 are dense"),
        ("hybrid:x.window=5", "expected layers such as 3 or 0-3"),
        ("hybrid:1.sinks=256", "expected layers of one grid"),
        ("hybrid:window=-1", "expected window to be an integer of at least 1, got -1"),
        ("hybrid:block=100", "expected block to be a multiple of query_block=32, got 100"),
        ("hybrid:query_block=48", "expected block to be a multiple of query_block=48, got 128"),
        ("hybrid:sinks=64", "expected sinks to be a multiple of block=128, got 64"),
        ("hybrid:hot_epoch=100", "expected hot_epoch to be a multiple of block=128, got 100"),
        ("hybrid:voters=30", "expected voters to be a multiple of head_groups=4, got 30"),
        ("hybrid:probes=33", "expected probes of at most query_block=32, got 33"),
        ("hybrid:anchor_gap=1", "expected an anchor_gap of at least 2, got 1"),
        ("hybrid:anchor_gap=8192", "expected an anchor_gap of at most window=4096, got 8192"),
        ("hybrid:retrieve_mass=1.5", r"expected retrieve_mass in \(0, 1\], got 1.5"),
        ("hybrid:candidates=17", r"expected candidates of at least 18 \(retrieved and hot blocks\), got 17"),
        ("hybrid:candidates=30,voters=128", "expected candidates of at least 34 .each voter"),
    ],
)
def test_refused(text: str, words: str):
    with pytest.raises(ValueError, match=words):
        parse_policy(text)


def test_refused_layers():
    for entry in ((3, 2, Dense()), (0, 1, None), (-1, 2, Dense()), (0, 1, Hybrid(layers=((0, 1, Dense()),)))):
        with pytest.raises(ValueError, match="expected layers"):
            Hybrid(layers=(entry,))
