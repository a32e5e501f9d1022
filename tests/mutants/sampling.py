"""Drawing tokens."""

from __future__ import annotations

from mutants.mutant import Mutant

SAMPLING = "tests/test_sampling.py"
NUMBERS = f"{SAMPLING}::test_each_penalty_and_bias_to_the_number"
SEEDS = f"{SAMPLING}::test_a_seed_always_means_the_same_tokens"
OF_A_SEED = f"{SAMPLING}::test_random_numbers_of_a_seed"

MUTANTS = [
    Mutant(
        "the best token is drawn last",
        "best_of",
        "np.argsort(-values, axis=1",
        "np.argsort(values, axis=1",
        "tests/test_sampling.py",
    ),
    Mutant(
        "the presence penalty is not applied",
        "_adjust",
        "np.float32(params.presence_penalty) * (counts > 0)",
        "0 * (counts > 0)",
        "tests/test_sampling.py",
    ),
    Mutant(
        "a repetition penalty makes negative logits likelier",
        "_adjust",
        "values * penalty",
        "values / penalty",
        NUMBERS,
    ),
    Mutant(
        "a repetition penalty makes positive logits likelier",
        "_adjust",
        "values / penalty",
        "values * penalty",
        NUMBERS,
    ),
    Mutant("penalties for what was written count the prompt", "_adjust", "row.ids[row.n_prompt :]", "row.ids", NUMBERS),
    Mutant(
        "the frequency penalty is not applied",
        "_adjust",
        "np.float32(params.frequency_penalty) * counts",
        "0 * counts",
        NUMBERS,
    ),
    Mutant(
        "penalties change the logits of the model themselves",
        "adjusted",
        "np.array(on_host(logits))",
        "on_host(logits)",
        NUMBERS,
    ),
    Mutant(
        "a bias replaces a logit",
        "_adjust",
        "logits[token] += np.float32(bias)",
        "logits[token] = np.float32(bias)",
        NUMBERS,
    ),
    Mutant(
        "what is not allowed is drawn",
        "_adjust",
        "row.allowed is not None",
        "False",
        f"{SAMPLING}::test_penalties_biases_and_what_is_allowed_change_one_row_alone",
    ),
    Mutant(
        "min_p is ignored",
        "_weights",
        "if params.min_p:",
        "if False:",
        f"{SAMPLING}::test_min_p_leaves_out_what_is_improbable_beside_the_best",
    ),
    Mutant(
        "the temperature is ignored",
        "_weights",
        "params.temperature, LEAST_TEMPERATURE",
        "1.0, LEAST_TEMPERATURE",
        SEEDS,
    ),
    Mutant("draws do not depend on how many there were before", "_first", "row.n_drawn", "0", SEEDS),
    Mutant("draws do not depend on the seed", "_first", "uniforms(row.params.seed,", "uniforms(0,", SEEDS),
    Mutant("a seed gives other texts than before", "uniforms", "(n + 1)", "n", OF_A_SEED),
    Mutant(
        "samples of a run have other seeds than before",
        "seed_of",
        "index * 0xD1B54A32D192ED03",
        "(index + 1) * 0xD1B54A32D192ED03",
        OF_A_SEED,
    ),
    Mutant(
        "the token that passes top_p is left out",
        "_choose",
        "cumulative - weights < limit",
        "cumulative < limit",
        SAMPLING,
    ),
    Mutant(
        "top_k leaves one more in",
        "best_of",
        "ids = np.argpartition(logits, n - k, axis=1)[:, n - k :]",
        "ids = np.argpartition(logits, n - k - 1, axis=1)[:, n - k - 1 :]",
        SAMPLING,
    ),
    Mutant(
        "log probabilities come from the logits alone",
        "log_probs",
        "float(values[token] - top - below)",
        "float(values[token] - top)",
        SAMPLING,
    ),
]
