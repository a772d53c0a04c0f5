"""All numbered statements of the five papers, and the page docs/record/theory.md that lists them.

    python -m benchmarks.theory.statements    # writes the page again

A statement *holds* where its bound was above what was measured on every problem tried, and where
what it says could be worked out in full; it *fails* with the counterexample of a test.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.theory import fedacs, fedagg, fedclup, fedpd, fedslr
from pfl.files import write

PAGE = Path(__file__).parents[2] / "docs" / "record" / "theory.md"
HOLDS = "holds"
PART = "in part"
FAILS = "fails"


@dataclass(frozen=True)
class Statement:
    """One statement.

    Args:
        paper: Its method.
        number: As the paper numbers it, with the equation.
        says: What it says, in a few words.
        verdict: `HOLDS`, `PART` or `FAILS`.
        why: The counterexample, what was tried, or what cannot be worked out.
        bounds: The functions that stand for it.
        tests: The tests that show it.
    """

    paper: str
    number: str
    says: str
    verdict: str
    why: str
    bounds: tuple[Callable, ...]
    tests: tuple[str, ...]


STATEMENTS = (
    Statement(
        "FedSLR",
        "Theorem 1, (9)",
        "cluster points are stationary for the penalized mean",
        HOLDS,
        "three clients that are not convex, η_g up to 1/(2L)",
        (fedslr.stationarity,),
        ("test_theorem_1_holds_for_clients_that_are_not_convex",),
    ),
    Statement(
        "FedSLR",
        "Theorem 2, (11) to (13)",
        "θ says how fast the gradient falls",
        PART,
        "C₂ is negative for every η_g < 1/(2L), so that (12) has the root of a negative number;"
        " with C₁ and the sign of C₂ mended (12) holds on quadratics. (13) fails: the gradient"
        " of w⁸/8 falls like T^(-7/6), and (13) has T^(-3/2). (11), for θ = 0, was not tried",
        (fedslr.c2, fedslr.linear_distance, fedslr.printed_exponent, fedslr.mended_exponent),
        (
            "test_the_constant_of_theorem_2_is_negative",
            "test_theorem_2_holds_with_its_constants_mended",
            "test_13_falls_too_fast",
        ),
    ),
    Statement(
        "FedSLR",
        "Theorem 3, (14)",
        "mean squared gradient mapping ends at the noise",
        HOLDS,
        "where w starts at its limit; the N of C₇ is not defined, so that its other part cannot"
        " be worked out",
        (fedslr.mean_squared_mapping,),
        ("test_theorem_3_holds", "test_theorem_3_holds_with_a_penalty"),
    ),
    Statement(
        "FedCLUP",
        "Theorem 1, (8)",
        "error: the smaller of two functions of λ",
        FAILS,
        "L = μ = 1, λ = 15.9: the first term has a pole where 4L²g(λ) = 1, and below it the"
        " bound of a mean of squares is -15.7, while q₁ is said to rise everywhere. The second"
        " term holds for every λ, the first where g ≤ 1/(8L²), which its proof needs. ρ²/n² in"
        " (70) is a misprint for ρ²/n",
        (fedclup.statistical_error, fedclup.inverse_q1),
        (
            "test_theorem_1_has_a_pole",
            "test_q1_is_not_monotone",
            "test_the_note_on_q1",
            "test_theorem_1_holds_where_its_proof_does",
        ),
    ),
    Statement(
        "FedCLUP",
        "Corollary 1, (9), (91)",
        "error at most C₃/N + C₄ min(R², 1/n)",
        HOLDS,
        "exact mean squares of two sets of clients, four R, three n",
        (fedclup.minimax_error, fedclup.minimax_penalty),
        ("test_corollary_1_holds_at_its_penalties", "test_the_constants_of_corollary_1"),
    ),
    Statement(
        "FedCLUP",
        "Theorem 2, (14)",
        "the global model converges linearly, given K",
        HOLDS,
        "spectral radii of a round, γ up to 0.99/L_g, though the proof needs (120) as well",
        (fedclup.rate, fedclup.local_steps),
        ("test_the_rate_of_theorem_2_holds",),
    ),
    Statement(
        "FedCLUP",
        "Corollary 2, (134)",
        "squared errors fall by 1 - (λ+L)/(4κ(λ+μ))",
        HOLDS,
        "with (134)'s K; the complexities are orders, without constants",
        (fedclup.rate_with_the_papers_steps, fedclup.steps_of_corollary_2),
        ("test_the_rate_of_corollary_2_holds", "test_the_rate_that_corollary_2_guarantees"),
    ),
    Statement(
        "FedCLUP",
        "Corollary 3, (15)",
        "error is optimization error plus statistical error",
        PART,
        "from a common start. Local models at their optimum 0 and a global one at 1 have the"
        " bound 0 and are at 1/2 a round later. The constants of its O[...] are not given;"
        " without noise it vanishes as n grows",
        (fedclup.optimization_error,),
        (
            "test_corollary_3_holds_from_a_common_start",
            "test_corollary_3_forgets_the_start_of_the_global_model",
        ),
    ),
    Statement(
        "FedCLUP",
        "Theorem 3, (143)",
        "SGD ends in a ball of σ²/(Bm)",
        PART,
        "with a new batch for each local step. With one batch a round, as Algorithm 2 is"
        " printed, the variance of one client with h = λ = γ = 1 and η = 0.0005 is more than ten"
        " times the ball",
        (fedclup.ball,),
        (
            "test_the_ball_of_theorem_3_holds_with_new_batches",
            "test_the_ball_of_theorem_3_fails_with_one_batch_a_round",
        ),
    ),
    Statement(
        "FedCLUP",
        "Corollary 4, (157)",
        "Corollary 3 without its factors 2 and 4",
        FAILS,
        "κ = 1: the rate is 0, and the model of h = λ = 1 is at 1/2 after a round",
        (fedclup.optimization_error_of_corollary_4,),
        ("test_corollary_4_lost_a_factor",),
    ),
    Statement(
        "FedAgg",
        "Theorem 1, (15)",
        "the rates that minimize a client's cost",
        HOLDS,
        "for given mean-field terms, under (14)",
        (fedagg.rates, fedagg.rate_by_15),
        (
            "test_theorem_1_minimizes_the_cost",
            "test_rates_solve_the_control_problem_for_any_terms",
        ),
    ),
    Statement(
        "FedAgg",
        "Proposition 1",
        "rates are linear in w, φ₁ and φ₂",
        PART,
        "in w and φ₂; in φ₁ they are rational",
        (fedagg.rates,),
        (
            "test_proposition_1_holds_in_w_and_phi_2",
            "test_the_last_two_epochs_have_the_papers_closed_forms",
        ),
    ),
    Statement(
        "FedAgg",
        "Theorem 2",
        "the mean-field terms have a fixed point",
        HOLDS,
        "it is the rate 0",
        (fedagg.next_rates,),
        (
            "test_theorem_2_and_proposition_2_have_the_rate_0",
            "test_the_exact_mean_field_does_not_train",
        ),
    ),
    Statement(
        "FedAgg",
        "Proposition 2",
        "iterations reach the fixed point",
        HOLDS,
        "they contract to 0",
        (fedagg.next_rates,),
        (
            "test_theorem_2_and_proposition_2_have_the_rate_0",
            "test_the_mean_field_shrinks_the_rate_geometrically",
        ),
    ),
    Statement(
        "FedAgg",
        "Proposition 3, (39)",
        "rates lie in (0, δ], δ < 1",
        FAILS,
        "α = 0.1, φ₁ = 1: distances of 2 and -1 have the rates 1.8 and -0.9; φ₁ = 1/3 exceeds (39)",
        (fedagg.last_rate, fedagg.last_rate_bound),
        (
            "test_proposition_3_is_not_implied",
            "test_the_bound_of_39_enlarges_a_denominator",
            "test_the_drawn_terms_reach_both_bounds",
        ),
    ),
    Statement(
        "FedAgg",
        "Proposition 4",
        "local models drift by L P δ_h",
        HOLDS,
        "two clients, equal and different rates",
        (fedagg.drift,),
        ("test_clients_stay_within_the_drift",),
    ),
    Statement(
        "FedAgg",
        "Theorem 3, (22), (23)",
        "squared distance falls, convex or not",
        FAILS,
        "(22) contracts with the largest rate: w²/2 with the rates 0.01, 0, 0, ... stays at"
        " 0.9801, where it has 0.0101. (23) is empty: Assumption 4 forces affine losses, which"
        " have no minimum. With one rate (22) holds",
        (fedagg.gap_of_convex, fedagg.gap_of_others),
        (
            "test_theorem_3_contracts_with_the_largest_rate",
            "test_theorem_3_says_nothing_with_the_smallest_rate",
            "test_assumption_4_forces_affine_losses",
            "test_of_a_constant_loss_nothing_is_left_in_23",
            "test_with_one_rate_the_bounds_hold",
        ),
    ),
    Statement(
        "FedAgg",
        "Proposition 5, (24)",
        "the mean loss falls in every round",
        FAILS,
        "losses 2w and -w with the rates 0.1 and 0.5: it rises by 0.075, where (24) has -0.025."
        " Under (14) it takes clients of different sizes, w and -3w, 9 to 1. With one rate, and"
        " under (14) with equal sizes, it holds",
        (fedagg.change_of_a_round,),
        (
            "test_proposition_5_fails_where_rates_differ",
            "test_proposition_5_fails_under_14_where_sizes_differ",
            "test_with_one_rate_the_bounds_hold",
            "test_under_14_with_equal_sizes_the_bounds_hold",
        ),
    ),
    Statement(
        "FedAgg",
        "Theorem 4, (25)",
        "the mean loss falls to a noise",
        FAILS,
        "its sum starts at 1: from the optimum of clients with the curvatures 1 and 4 two"
        " epochs lead to 45η⁴/16, where T = 1 has 0. From 0 on it holds with one rate and fails"
        " with two, by Algorithm 2's steps; with a rate of 0 it is empty",
        (fedagg.gap_of_loss,),
        (
            "test_theorem_4_needs_its_sum_from_0",
            "test_theorems_4_and_5_fail_where_rates_differ",
            "test_with_a_rate_of_0_theorems_4_and_5_are_empty",
            "test_with_one_rate_the_bounds_hold",
        ),
    ),
    Statement(
        "FedAgg",
        "Theorem 5, (26)",
        "the mean squared gradient falls to a noise",
        FAILS,
        "(w ± 1)²/2 with the rates 0.005 and 0.01 rest at w = 1/3, by Algorithm 2's steps. With"
        " one rate it holds; with a rate of 0 it is empty",
        (fedagg.mean_squared_gradient,),
        (
            "test_theorems_4_and_5_fail_where_rates_differ",
            "test_with_a_rate_of_0_theorems_4_and_5_are_empty",
            "test_with_one_rate_the_bounds_hold",
        ),
    ),
    Statement(
        "FedACS",
        "Theorem 2.1, (6), (7)",
        "the least gradient falls like K^(-1/2)",
        HOLDS,
        "without the O(1/K), for which no constant is given, convex and not. (7), a limit, was"
        " not tried",
        (fedacs.least_squared_gradient,),
        ("test_theorem_2_1_holds",),
    ),
    Statement(
        "FedPD",
        "Claim 2.1",
        "every method needs O(1/ε) rounds",
        HOLDS,
        "as an order: a round of three methods reaches one more coordinate of two agents' chain",
        (fedpd.least_rounds,),
        ("test_a_round_reaches_one_more_coordinate_of_the_chain",),
    ),
    Statement(
        "FedPD",
        "Theorem 2, (50)",
        "Claim 2.1 with a constant",
        FAILS,
        "its own chain with N = T = 6 takes one round, where (50) asks for more than 6; for N >"
        " 197 agents gradient descent needs fewer rounds on every problem",
        (fedpd.least_rounds, fedpd.rounds_of_gradient_descent),
        (
            "test_theorem_2_fails_on_its_own_chain",
            "test_theorem_2_fails_for_200_agents_on_every_problem",
        ),
    ),
    Statement(
        "FedPD",
        "Claim 2.2",
        "FedAvg with a constant rate can diverge",
        HOLDS,
        "±x²/2, every η > 0 and Q > 1",
        (fedpd.growth,),
        ("test_claim_2_2", "test_fedavg_diverges_on_opposed_clients"),
    ),
    Statement(
        "FedPD",
        "Theorem 1, (14)",
        "the mean gap falls to C(p) δ²",
        FAILS,
        "for a small L: 0.02 w²/2 with η = 0.5 has a first gap of three times the bound, since"
        " 4L² is below 2 in (104). With max(4L², 2), and for L ≥ 1 as printed, it holds. Table"
        " 2's C(p) is within a factor of 2 of its formula for p < 0.46",
        (fedpd.mean_gap, fedpd.skipping, fedpd.table_2),
        (
            "test_theorem_1_fails_for_a_small_curvature",
            "test_case_1_of_theorem_1_holds",
            "test_case_2_of_theorem_1_holds",
            "test_table_2_is_right_within_a_factor_of_2_below_p_046",
        ),
    ),
    Statement(
        "FedPD",
        "Claim D.1",
        "FedAvg converges with falling steps, bounded gradients",
        FAILS,
        "its bound lacks an L²: a Huber loss of curvature 40 and -x/2, with η = 0.001, rest at"
        " four times the bound. For L = 1 it holds",
        (fedpd.mean_gap_of_fedavg,),
        ("test_claim_d1_lost_a_curvature", "test_claim_d1_holds_for_a_curvature_of_1"),
    ),
    Statement(
        "FedPD",
        "Claim D.2",
        "without bounded gradients FedAvg can diverge",
        HOLDS,
        "with ±x²/2 for the ±x² in print",
        (fedpd.growth_by_round,),
        ("test_claim_d2",),
    ),
    Statement(
        "FedPD",
        "Theorem 3, (105)",
        "with variance reduction the mean gap falls",
        FAILS,
        "for a small L: 0.02 w²/2 with η = 2, γ = 100. For steps that it allows C₁₂ is"
        " negative, also with the paper's Q = 2, I = 100, B = 1, where C₉ cannot be worked out."
        " Where C₁₂ is positive and L = 1 it holds",
        (fedpd.c9, fedpd.c12),
        (
            "test_theorem_3_fails_for_a_small_curvature",
            "test_theorem_3_allows_steps_whose_constant_is_negative",
            "test_theorem_3_holds_where_its_constants_are_positive",
        ),
    ),
)

HEAD = """---
search:
  exclude: true
---

# The papers' theorems as inequalities

Every numbered theorem, proposition, corollary and claim of the five papers is a function of the
constants that it names, in `benchmarks/theory`, and stands beside what it bounds in `tests/theory`,
on problems whose models, expectations or rates are exact. *Holds* means on every problem tried.
*Fails* means as printed, with the smallest counterexample that we found. Lemmas are not listed.
Theorem 3 of FedPD is the arXiv's; the journal has another.

`python -m benchmarks.theory.statements` writes this page.

"""


def counts() -> str:
    """Returns how many statements have which verdict, as a sentence."""
    parts = []
    for verdict in (HOLDS, PART, FAILS):
        number = sum(statement.verdict == verdict for statement in STATEMENTS)
        parts.append(f"{number} {verdict}")
    words = ", ".join(parts).replace(HOLDS, "hold").replace(PART, "hold in part")
    return f"of {len(STATEMENTS)} statements {words.replace(FAILS, 'fail as printed')}."


def page() -> str:
    """Returns the page's text."""
    lines = [HEAD + counts().capitalize() + "\n"]
    lines.append("| paper | number | says | verdict | tried, or the counterexample | tests |")
    lines.append("|---|---|---|---|---|---|")
    for statement in STATEMENTS:
        tests = ", ".join(f"`{test}`" for test in statement.tests)
        cells = (
            statement.paper,
            statement.number,
            statement.says,
            statement.verdict,
            statement.why,
            tests,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    write(PAGE, page())
