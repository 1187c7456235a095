"""Correlated noise: strategies against dense matrices, sensitivity against every pattern, streams, colour."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from diskdp import accounting
from diskdp.errors import CheckpointError, NoiseError
from diskdp.filters import gains
from diskdp.noise import Secret
from diskdp.noise.correlated import (
    BLT,
    Banded,
    CorrelatedNoise,
    Participation,
    Strategy,
    Tree,
    Workload,
    advance,
    autocovariance,
    best_gain,
    covariance,
    cyclic_poisson,
    decoder,
    encoder,
    errors,
    filtered_error,
    fit_banded,
    fit_blt,
    inverse_column,
    searched_sensitivity,
    sensitivity,
    squared_errors,
)

STRATEGIES: list[Strategy] = [
    Banded((1.0,)),
    Banded((1.0, 1.0)),
    Banded.square_root(5),
    Banded((1.0, 0.6, 0.6, 0.0)),
    BLT((0.3, 0.2), (0.9, 0.4)),
    BLT((1.0,), (0.0,)),
    Tree(64),
    Tree(64, reduced=False),
    Tree(8),
    Tree(6),
    Tree(7, reduced=False),
    Tree(1),
]

# Statistical tests compare z-scores with 6, beyond which a normal is with probability 2e-9: at most 200 comparisons a
# test keep its false alarms below FALSE_ALARM.
FALSE_ALARM = 1e-6
Z_BOUND = 6.0


def streamed(strategy: Strategy, steps: int) -> np.ndarray:
    """The matrix that `advance` applies: fed with unit vectors, one for each fresh normal it asks for."""
    most = len(encoder(strategy, steps))
    asked = itertools.count()

    def fresh(number: int) -> dict[str, torch.Tensor]:
        return {"w": torch.eye(most, dtype=torch.float64)[next(asked)].clone()}

    memory: dict[int, dict[str, torch.Tensor]] = {}
    rows = []
    for step in range(steps):
        before = {slot: tensors["w"].clone() for slot, tensors in memory.items()}
        noise, after = advance(strategy, step, memory, fresh)
        assert all(torch.equal(memory[slot]["w"], held) for slot, held in before.items())  # left as it was
        memory = after
        rows.append(noise["w"].numpy())
    assert next(asked) == most
    return np.array(rows)


# --- strategies ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("steps", [1, 2, 13, 40])
def test_the_stream_is_the_matrix_and_undoes_the_encoder(strategy: Strategy, steps: int) -> None:
    matrix, dense = streamed(strategy, steps), decoder(strategy, steps)
    np.testing.assert_allclose(matrix, dense, atol=1e-12)
    np.testing.assert_allclose(dense @ encoder(strategy, steps), np.eye(steps), atol=1e-12)
    np.testing.assert_allclose(matrix @ matrix.T, covariance(strategy, steps), atol=1e-12)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_noise_of_a_step_needs_no_normals_of_later_ones(strategy: Strategy) -> None:
    longer, shorter = decoder(strategy, 30), decoder(strategy, 17)
    np.testing.assert_allclose(longer[:17, : shorter.shape[1]], shorter, atol=1e-12)
    assert not longer[:17, shorter.shape[1] :].any()


@pytest.mark.parametrize("strategy", [Tree(16), Tree(5), Tree(16, reduced=False)])
def test_the_noise_of_a_tree_costs_no_more_than_its_nodes(strategy: Tree) -> None:
    """Releasing g + L z has (L Lᵀ)⁻¹ where releasing all nodes has CᵀC: the second is an upper bound."""
    nodes = encoder(strategy, 16)
    spare = nodes.T @ nodes - np.linalg.inv(covariance(strategy, 16))
    assert np.linalg.eigvalsh(spare).min() > -1e-9


def test_memory_is_as_small_as_the_strategy_says() -> None:
    def kept(strategy: Strategy, steps: int) -> int:
        memory: dict[int, dict[str, torch.Tensor]] = {}
        most = 0
        for step in range(steps):
            _, memory = advance(strategy, step, memory, lambda number: {"w": torch.ones(1)})
            most = max(most, len(memory))
        return most

    assert [kept(s, 300) for s in (Banded.square_root(7), BLT((0.1,) * 3, (0.5,) * 3), Tree(256))] == [6, 3, 8]


def test_plain_and_reduced_trees_have_the_known_variances() -> None:
    plain, reduced = (squared_errors(Tree(64, reduced=r), Workload(64)) for r in (False, True))
    np.testing.assert_allclose(plain, [bin(count).count("1") for count in range(1, 65)])
    root = 1.0  # Honaker: 1/v_h = 1 + 1/(2 v_{h-1}), so that v_h = 1/(2 - 2**-h)
    for _ in range(6):
        root = 1 / (1 + 1 / (2 * root))
    assert reduced[-1] == pytest.approx(root) == pytest.approx(1 / (2 - 2**-6))
    assert (reduced <= plain + 1e-12).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Banded(()), "first coefficient"),
        (lambda: Banded((2.0, 1.0)), "first coefficient"),
        (lambda: Banded((1.0, -0.1)), "not be negative"),
        (lambda: Banded((1.0, 0.2, 0.3)), "must not rise"),
        (lambda: Banded((1.0, math.nan)), "not be negative"),
        (lambda: Banded.square_root(0), "bands"),
        (lambda: BLT((0.6, 0.6), (0.1, 0.2)), "at most 1"),
        (lambda: BLT((0.6,), (1.0,)), "below 1"),
        (lambda: BLT((-0.1,), (0.5,)), "0 or more"),
        (lambda: BLT((0.1,), (0.5, 0.6)), "one of each"),
        (lambda: Tree(0), "restart_every"),
        (lambda: Tree(2.5), "whole number"),  # type: ignore[arg-type]
        (lambda: Participation(0), "steps"),
        (lambda: Participation(10**7), "bounded up to"),
        (lambda: Participation(10, separation=0), "separation"),
        (lambda: encoder(Tree(4), 10_000), "written out"),
        (lambda: Workload(4, momentum=1.0), "momentum"),
        (lambda: Workload(4, learning_rates=(1.0,)), "learning_rates"),
        (lambda: errors(Tree(4), Workload(4), Participation(5)), "the same"),
        (lambda: fit_banded(5, Workload(4)), "no more than"),
        (lambda: fit_blt(2, Workload(4), Participation(5)), "the same"),
        (lambda: fit_blt(9, Workload(4)), "buffers"),
        (lambda: fit_banded(2, Workload(2, learning_rates=(1.0, 0.5))), "constant learning rate"),
        (lambda: cyclic_poisson(Tree(8), 8, 10, 1000), "not banded"),
        (lambda: cyclic_poisson(Banded.square_root(8), 8, 10, 1000, parts=7), "overlap"),
        (lambda: cyclic_poisson(Banded.square_root(8), 8, 200, 1000), "fewer bands"),
        (lambda: searched_sensitivity(np.array([[1.0, -1.0], [0.0, 1.0]]).T @ np.eye(2), Participation(3)), "agree"),
        (lambda: searched_sensitivity(np.array([[1.0, 0.0], [-0.5, 1.0]]), Participation(2)), "negative product"),
        (lambda: filtered_error(0.1, np.array([1.0, -2.0]), 0.1), "no autocovariances"),
        (lambda: filtered_error(0.0, np.array([1.0]), 0.1), "gain"),
    ],
)
def test_what_has_no_proof_is_refused(make, message: str) -> None:
    with pytest.raises(NoiseError, match=message):
        make()


# --- sensitivity -----------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    ratios=st.lists(st.floats(0, 1), max_size=5),
    steps=st.integers(1, 10),
    times=st.integers(1, 4),
    separation=st.integers(1, 4),
)
def test_toeplitz_sensitivity_is_that_of_the_worst_pattern(
    ratios: list[float], steps: int, times: int, separation: int
) -> None:
    strategy = Banded(tuple(float(c) for c in np.cumprod([1.0, *ratios])))
    who = Participation(steps, times, separation)
    slow, fast = searched_sensitivity(encoder(strategy, steps), who), sensitivity(strategy, who)
    assert slow <= fast <= slow * (1 + 2e-9)


@pytest.mark.parametrize(
    "who", [Participation(11), Participation(11, 3, 3), Participation(11, 11, 1), Participation(9, 2, 7)]
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_pattern_beats_the_bound(strategy: Strategy, who: Participation) -> None:
    slow, fast = searched_sensitivity(encoder(strategy, who.steps), who), sensitivity(strategy, who)
    assert slow <= fast
    if not isinstance(strategy, Tree) or who.times == 1:
        assert fast <= slow * (1 + 2e-9)


def test_the_bound_for_trees_is_met_where_participations_fit_the_nodes() -> None:
    who = Participation(16, times=4, separation=4)
    assert sensitivity(Tree(16), who) == pytest.approx(searched_sensitivity(encoder(Tree(16), 16), who))
    assert sensitivity(Tree(4), who) ** 2 == pytest.approx(4 * 3)  # a tree of three levels an epoch


def test_vectors_that_differ_do_not_beat_equal_ones() -> None:
    rng = np.random.default_rng(0)
    who = Participation(12, times=4, separation=3)
    for strategy in (Banded.square_root(6), BLT((0.5, 0.3), (0.9, 0.5)), Tree(12)):
        matrix = encoder(strategy, 12)
        for _ in range(100):
            vectors = np.zeros((12, 3))
            for step in (0, 3, 6, 9) if rng.random() < 0.5 else (1, 4, 8, 11):
                direction = rng.standard_normal(3) + np.array([2.0, 0.0, 0.0])
                vectors[step] = direction / np.linalg.norm(direction)
            assert np.linalg.norm(matrix @ vectors) <= sensitivity(strategy, who)


@pytest.mark.parametrize("strategy", [Banded.square_root(3), BLT((0.5, 0.3), (0.9, 0.5))])
def test_steps_made_again_cost_at_most_a_mechanism_more(strategy: Strategy) -> None:
    """Steps 4 to 7 are released, lost and made again with other sums: rows 0 to 7, then rows 4 to 11 of another branch.

    Up to step 3 both branches have the same vectors of a record, from there on each its own (columns from the 8th on).
    """
    steps, back, lost = 12, 4, 8
    matrix = encoder(strategy, steps)
    both = np.zeros((lost + steps - back, lost + steps - back))
    both[:lost, :lost] = matrix[:lost, :lost]
    both[lost:, :back] = matrix[back:, :back]
    both[lost:, lost:] = matrix[back:, back:]

    def change(pattern: tuple[int, ...]) -> float:
        places = [step for step in pattern if step < lost]
        places += [lost + step - back for step in pattern if step >= back]
        return float(np.linalg.norm(both[:, places].sum(axis=1)))

    who = Participation(steps, times=4, separation=3)
    bound = sensitivity(strategy, who)
    assert bound < max(change(pattern) for pattern in who.patterns()) < math.sqrt(2) * bound
    if isinstance(strategy, Banded):  # sampled: the steps that reach into those made again count twice, no others
        once = sensitivity(strategy, Participation(steps))
        for step in range(steps):
            reaches = back - strategy.bands < step < lost
            assert change((step,)) <= once * (math.sqrt(2) if reaches else 1)
        assert change((4,)) > 1.1 * once


# --- errors and fits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_workload_is_what_sgd_does(momentum: float) -> None:
    rates = (1.0, 0.5, 0.25, 2.0, 1.0)
    gradients = np.random.default_rng(0).standard_normal(5)
    weight, velocity, seen = 0.0, 0.0, []
    for gradient, rate in zip(gradients, rates):
        velocity = momentum * velocity + gradient
        weight += rate * velocity
        seen.append(weight)
    np.testing.assert_allclose(Workload(5, momentum, rates).matrix() @ gradients, seen)
    constant = Workload(5, momentum)
    np.testing.assert_allclose(constant.matrix()[:, 0], constant.first_column())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_errors_are_those_of_dense_matrices(strategy: Strategy) -> None:
    for workload in (Workload(24), Workload(24, momentum=0.8), Workload(24, 0.5, tuple(np.linspace(1, 0.1, 24)))):
        dense = workload.matrix() @ covariance(strategy, 24) @ workload.matrix().T
        np.testing.assert_allclose(squared_errors(strategy, workload), np.diag(dense), rtol=1e-10)
    found = errors(strategy, Workload(24), Participation(24, 2, 12))
    std = sensitivity(strategy, Participation(24, 2, 12))
    dense = np.diag(np.tril(np.ones((24, 24))) @ covariance(strategy, 24) @ np.tril(np.ones((24, 24))).T)
    assert found.largest == pytest.approx(std * math.sqrt(dense.max()))
    assert found.root_mean_square == pytest.approx(std * math.sqrt(dense.mean()))


@pytest.mark.parametrize("objective", ["mean", "max"])
def test_fitted_bands_are_those_of_a_search_without_derivatives(objective: str) -> None:
    workload = Workload(20, momentum=0.5)

    def loss(tail: np.ndarray) -> float:
        column = np.array([1.0, *tail])
        matrix = np.linalg.inv(sum(c * np.eye(20, k=-i) for i, c in enumerate(column)))
        found = ((workload.matrix() @ matrix) ** 2).sum(axis=1)
        return math.log((column @ column) * (found.mean() if objective == "mean" else found.max()))

    fitted = fit_banded(3, workload, objective)
    searched = optimize.minimize(loss, [0.5, 0.3], method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-13})
    assert loss(np.array(fitted.coefficients[1:])) <= searched.fun + 1e-8
    assert 1 >= searched.x[0] >= searched.x[1] >= 0  # so the search ended where fits may


def test_fits_are_better_than_where_they_start() -> None:
    workload, who = Workload(256), Participation(256, 4, 64)
    bands = [errors(s, workload, who).root_mean_square for s in (Banded.square_root(8), fit_banded(8, workload))]
    assert bands[1] < 0.95 * bands[0]
    one, three = (errors(fit_blt(k, workload, who), workload, who).root_mean_square for k in (1, 3))
    assert three < one < 0.3 * errors(Banded((1.0,)), workload, who).root_mean_square
    full = errors(Banded.square_root(256), workload, Participation(256)).largest
    assert errors(fit_blt(4, workload, objective="max"), workload, Participation(256)).largest < 1.05 * full


# --- sampling --------------------------------------------------------------------------------------------


def test_cyclic_sampling_is_a_sampled_gaussian_for_the_whole_mechanism() -> None:
    """Four steps, two bands: a record of part 0 may be in steps 0 and 2. All of C g, a mixture of four Gaussians."""
    strategy, sigma = Banded((1.0, 0.7)), 1.1
    claimed = cyclic_poisson(strategy, steps=4, batch_size=10, dataset_size=100)
    assert claimed[:2] == (0.2, 2)
    columns = encoder(strategy, 4)[:, [0, 2]]
    norms = np.linalg.norm(columns, axis=0)
    assert columns[:, 0] @ columns[:, 1] == 0  # so two coordinates are enough
    spread = sigma * claimed.sensitivity
    grid = np.linspace(-9 * spread, 9 * spread + norms.max(), 1501)
    x, y = np.meshgrid(grid, grid, indexing="ij")
    cell = (grid[1] - grid[0]) ** 2
    normal = stats.norm(scale=spread).pdf
    without = normal(x) * normal(y)
    member = np.zeros_like(without)
    for first, second in itertools.product((0, 1), repeat=2):
        chance = claimed.rate ** (first + second) * (1 - claimed.rate) ** (2 - first - second)
        member += chance * normal(x - first * norms[0]) * normal(y - second * norms[1])
    for epsilon in (0.1, 0.5, 1.0):
        removed = np.maximum(member - math.exp(epsilon) * without, 0).sum() * cell
        added = np.maximum(without - math.exp(epsilon) * member, 0).sum() * cell
        bound = accounting.delta(sigma, claimed.rate, claimed.steps, epsilon)
        assert max(removed, added) == pytest.approx(bound, rel=2e-3, abs=1e-7)


def test_parts_and_rates() -> None:
    strategy = Banded.square_root(4)
    assert cyclic_poisson(strategy, 101, 3, 700).steps == 26
    assert cyclic_poisson(strategy, 101, 3, 700, parts=7)[:2] == (0.03, 15)
    for batch, size in ((1, 7), (3, 49), (5, 10**6 + 3)):
        rate = cyclic_poisson(strategy, 10, batch, size).rate
        assert 4 * batch / size <= rate <= 4 * batch / size * (1 + 1e-15)


# --- streams ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [Banded.square_root(3), BLT((0.5, 0.2), (0.9, 0.3)), Tree(4)])
def test_noise_has_the_covariance_of_the_strategy(strategy: Strategy) -> None:
    steps, size = 6, 200_000
    noise = CorrelatedNoise(Secret.from_os(), strategy, steps)
    parts = [noise.add({"a": torch.zeros(size // 2), "b": torch.zeros(2, size // 4)}, 0.5, t) for t in range(steps)]
    drawn = np.array([torch.cat((part["a"], part["b"].reshape(-1))).double().numpy() for part in parts])
    truth = 0.25 * covariance(strategy, steps)
    spread = np.sqrt((np.outer(np.diag(truth), np.diag(truth)) + truth**2) / size)
    assert np.abs((drawn @ drawn.T / size - truth) / spread).max() < Z_BOUND
    assert np.abs(drawn.mean(axis=1) / np.sqrt(np.diag(truth) / size)).max() < Z_BOUND
    other = np.roll(drawn, 1, axis=1)  # coordinates are independent
    assert np.abs(drawn @ other.T / size / np.sqrt(np.outer(np.diag(truth), np.diag(truth)) / size)).max() < Z_BOUND


def some_sums(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"w": torch.randn(40, 5, generator=generator), "b": torch.randn(7, generator=generator).double()}


@pytest.mark.parametrize("strategy", [Banded((1.0,)), Banded.square_root(4), BLT((0.5, 0.2), (0.9, 0.3)), Tree(8)])
def test_going_on_from_a_state_is_going_on(strategy: Strategy) -> None:
    secret = Secret.from_seed(3)
    whole = CorrelatedNoise(secret, strategy, 12)
    released = [whole.add(some_sums(t), 1.5, t) for t in range(12)]
    for stop in (0, 1, 5, 8, 12):
        first = CorrelatedNoise(secret, strategy, 12)
        for t in range(stop):
            first.add(some_sums(t), 1.5, t)
        second = CorrelatedNoise(secret, strategy, 12)
        second.load_state_dict(first.state_dict())
        for t in range(stop, 12):
            again = second.add(some_sums(t), 1.5, t)
            assert all(torch.equal(again[name], released[t][name]) for name in again)
            assert again["w"].dtype == torch.float32
            assert again["b"].dtype == torch.float64


def test_another_sum_has_other_normals_from_there_on() -> None:
    """The fresh normals are C applied to the noise; they must be independent although later sums are the same."""
    strategy, size, steps = Banded((1.0, 0.5)), 100_000, 4
    runs = []
    for moved in (0.0, 2.0**-20):
        noise = CorrelatedNoise(Secret.from_seed(5), strategy, steps)
        rows = []
        for t in range(steps):
            total = torch.full((size,), moved if t == 1 else 0.0, dtype=torch.float64)
            rows.append((noise.add({"w": total}, 1.0, t)["w"] - total).numpy())
        runs.append(encoder(strategy, steps) @ np.array(rows))
    assert np.abs(runs[0][0] - runs[1][0]).max() == 0
    scores = runs[0][1:] @ runs[1][1:].T / math.sqrt(size)
    assert np.abs(scores).max() < Z_BOUND
    np.testing.assert_allclose(np.var(runs[0], axis=1), 1.0, atol=Z_BOUND * math.sqrt(2 / size))


def test_steps_secrets_strategies_and_deviations_are_held_to() -> None:
    strategy = Banded.square_root(3)
    noise = CorrelatedNoise(Secret.from_seed(0), strategy, 2)
    with pytest.raises(NoiseError, match="step 1 where step 0 is due"):
        noise.add(some_sums(0), 1.0, 1)
    noise.add(some_sums(0), 1.0, 0)
    with pytest.raises(NoiseError, match="step 0 where step 1 is due"):
        noise.add(some_sums(0), 1.0, 0)
    with pytest.raises(NoiseError, match="deviation"):
        noise.add(some_sums(1), 2.0, 1)
    with pytest.raises(NoiseError, match="shapes"):
        noise.add({"w": torch.zeros(3)}, 1.0, 1)
    state = noise.state_dict()
    noise.add(some_sums(1), 1.0, 1)
    with pytest.raises(NoiseError, match="beyond"):
        noise.add(some_sums(2), 1.0, 2)
    with pytest.raises(CheckpointError, match="another secret"):
        CorrelatedNoise(Secret.from_seed(1), strategy, 2).load_state_dict(state)
    with pytest.raises(CheckpointError, match="cannot go on as"):
        CorrelatedNoise(Secret.from_seed(0), Banded.square_root(4), 2).load_state_dict(state)
    with pytest.raises(CheckpointError, match="no state"):
        noise.load_state_dict({"step": 1})
    for entry, value in (("step", 0), ("std", 1.0000001), ("history", "00"), ("forms", [])):
        with pytest.raises(CheckpointError, match="damaged"):
            CorrelatedNoise(Secret.from_seed(0), strategy, 2).load_state_dict({**state, entry: value})
    state["memory"]["0/w"][3, 2] ^= 1
    with pytest.raises(CheckpointError, match="damaged"):
        CorrelatedNoise(Secret.from_seed(0), strategy, 2).load_state_dict(state)


def test_the_state_does_not_show_the_noise() -> None:
    size = 50_000
    noise = CorrelatedNoise(Secret.from_os(), Banded((1.0, 0.5)), 3)
    shown = noise.add({"w": torch.zeros(size)}, 1.0, 0)["w"].view(torch.int32).numpy()
    hidden = noise.state_dict()["memory"]["0/w"].numpy()
    for bit in range(32):  # signs and exponents of noise are far from even; masked they are, and agree by chance
        agreeing = np.count_nonzero((shown >> bit & 1) == (hidden >> bit & 1))
        assert abs(agreeing - size / 2) < Z_BOUND * math.sqrt(size) / 2
        assert abs(np.count_nonzero(hidden >> bit & 1) - size / 2) < Z_BOUND * math.sqrt(size) / 2


def test_no_noise_where_the_deviation_is_zero() -> None:
    noise = CorrelatedNoise(Secret.from_seed(0), Tree(4), 2)
    for t in range(2):
        assert torch.equal(noise.add(some_sums(t), 0.0, t)["w"], some_sums(t)["w"])


# --- colour ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [Banded((1.0,)), Banded((1.0, 0.5, 0.25)), BLT((0.4,), (0.7,))])
def test_autocovariance_is_that_of_late_steps(strategy: Strategy) -> None:
    late = covariance(strategy, 200)
    np.testing.assert_allclose(autocovariance(strategy, 100)[:9], late[150, 150:159], atol=1e-12)
    shape = inverse_column(strategy, 100)
    assert autocovariance(strategy, 100)[0] == pytest.approx(shape @ shape)


def test_autocovariance_of_a_tree_is_that_at_a_place_drawn_evenly() -> None:
    strategy = Tree(8)
    whole = covariance(strategy, 24)  # three trees: those of other trees have no part in it
    for lag in range(10):
        expected = np.mean([whole[8 + place, 8 + place + lag] for place in range(8) if place + lag < 16])
        kept = sum(1 for place in range(8) if place + lag < 16) / 8
        assert autocovariance(strategy, 12)[lag] == pytest.approx(expected * kept, abs=1e-12)


@pytest.mark.parametrize("observed", [0.5, 1.0, 20.0])
@pytest.mark.parametrize("drift", [1e-4, 0.1, 3.0])
def test_for_white_noise_the_best_gain_is_kalmans(observed: float, drift: float) -> None:
    steady, found = gains.steady_state(observed, 0.0, drift), best_gain(np.array([observed]), drift)
    assert found.gain == pytest.approx(steady.gain, rel=1e-6)
    assert found.error == pytest.approx(steady.variance, rel=1e-10)


@pytest.mark.parametrize("strategy", [Banded.square_root(16), BLT((0.4, 0.1), (0.7, 0.95)), Tree(16)])
def test_filtered_error_against_dense_matrices_and_a_scan(strategy: Strategy) -> None:
    covariances = autocovariance(strategy, 400)
    kappa = 0.07
    weights = kappa * (1 - kappa) ** np.arange(400)
    lags = np.abs(np.subtract.outer(np.arange(400), np.arange(400)))
    drifts = 0.01 * ((1 - kappa) ** (2 * np.arange(1, 2000))).sum()
    expected = weights @ covariances[lags] @ weights + drifts
    assert filtered_error(kappa, covariances, 0.01) == pytest.approx(expected, rel=1e-9)
    found = best_gain(covariances, 0.01)
    scanned = min(filtered_error(k, covariances, 0.01) for k in np.geomspace(1e-4, 1, 5000))
    assert found.error <= scanned * (1 + 1e-12)
    white = best_gain(covariances[:1], 0.01)
    assert found.error < white.error  # what is known of the colour helps, ...
    assert found.error <= filtered_error(white.gain, covariances, 0.01)  # ... also for the gain


def test_filtered_error_is_what_filtering_noise_of_the_stream_leaves() -> None:
    strategy, size, steps, drift = Banded((1.0, 0.6, 0.3)), 20_000, 120, 0.05
    found = best_gain(autocovariance(strategy, 200), drift)
    noise, rng = CorrelatedNoise(Secret.from_seed(11), strategy, steps), np.random.default_rng(11)
    truth, estimate = np.zeros(size), np.zeros(size)
    for t in range(steps):
        truth = truth + math.sqrt(drift) * rng.standard_normal(size)
        observed = noise.add({"w": torch.from_numpy(truth.copy())}, 1.0, t)["w"].numpy()
        estimate = estimate + found.gain * (observed - estimate)
    assert (1 - found.gain) ** (2 * steps) < 1e-9  # the start is forgotten
    errors_seen = float(np.mean((estimate - truth) ** 2))
    assert abs(errors_seen / found.error - 1) < Z_BOUND * math.sqrt(2 / size)
