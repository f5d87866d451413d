"""Exercises of both notebooks: question, number to guess, function to fill in, and code with answers to unfold."""

from typing import NamedTuple


class Exercise(NamedTuple):
    """Exercise of the notebooks.

    Args:
        name: its name in `sqrtdk.exercises.answers`.
        question: heading and question.
        guess: the number to guess before anything is computed.
        function: the name of the function to fill in.
        head: the function's first lines, which both notebooks share.
        gap: its body for students.
        solution: its body in the notebook with answers.
        hint: what helps a student without giving the answer away.
        code: cells of the notebook with answers.
        trains: whether the last of these cells trains models, which takes a minute.
        answer: the text to unfold.
        note: text before the code of the notebook with answers.
    """

    name: str
    question: str
    guess: str
    function: str
    head: str
    gap: str
    solution: str
    hint: str
    code: tuple[str, ...]
    answer: str
    trains: bool = False
    note: str = ""


INTRODUCTION = """\
# Five exercises on the scale of attention

They are those of "Section 5.3: Scaled Attention: Why √d Matters". Each has a question, a number to guess first, a solution with its check, code to run and change, and an answer to
unfold. Without solutions they are in [the notebook for students](exercises-student.ipynb). `pip install "sqrtdk[report,torch]"` is all that the notebook needs; torch only for exercise 3.

The numbers in bold in the answers are printed by the cells: change a seed and see how far they move."""

IMPORTS = """\
import numpy as np

import sqrtdk
from sqrtdk import exercises, theory
from sqrtdk.exercises.answers import check, compare
from sqrtdk.report import figure"""

STUDENT_INTRODUCTION = """\
# Five exercises on the scale of attention, to fill in

They are those of "Section 5.3: Scaled Attention: Why √d Matters". For each one:

1. Set `guess` to a number and run the cell: the reply compares your guess with the computed number.
2. Replace each `...` in the function and run the cell: the check says what is wrong, by what your function computes.

Answers, figures and a model to train are in [the notebook with answers](exercises.ipynb). `pip install sqrtdk` is all that this notebook needs."""

STUDENT_IMPORTS = """\
import numpy as np

import sqrtdk
from sqrtdk.exercises.answers import check, compare"""

LAST = """\
## Go on

`sqrtdk explain --d-k 64 --n 1024` does this for your size, `sqrtdk claims` checks every sentence of the four sources, and [Getting started](getting-started.md) has the library."""

EXERCISES = (
    Exercise(
        name="spread",
        question="""\
## 1. How far do scores spread without scaling?

Sample queries and keys with entries of mean 0 and variance 1. What is the standard deviation of q·k at dₖ = 512? And after division by √dₖ, by dₖ?""",
        guess="standard deviation of q·k at dₖ = 512",
        function="spread",
        head="""\
def spread(q, k):
    \"\"\"Return the standard deviation of q·k over the pairs, without and with division by √dₖ.

    q and k have shape [pairs, dₖ].
    \"\"\"
""",
        gap="""\
    before = ...
    after = ...
    return before, after""",
        solution="""\
    dot_products = (q * k).sum(axis=1)
    return dot_products.std(), (dot_products / q.shape[1] ** 0.5).std()""",
        hint="q·k is a sum of dₖ products. Which axis holds the entries of one pair?",
        code=(
            """\
rng = np.random.default_rng(0)
for d_k in (4, 64, 512):
    q, k = rng.standard_normal((2, 20_000, d_k))
    scores = (q * k).sum(axis=1)
    print(
        f"dₖ {d_k:3}: std {scores.std():.2f} (√dₖ is {d_k**0.5:.2f}); "
        f"over √dₖ {(scores / d_k**0.5).std():.2f}, over dₖ {(scores / d_k).std():.3f}"
    )""",
            """\
figure(exercises.variance(d_ks=(4, 16, 64, 256, 512)))""",
        ),
        answer="""\
q·k is a sum of dₖ products. Each has variance 1 and they are independent, so the variances add up: Var(q·k) = dₖ. At dₖ = 512 the standard
deviation is √512 = **22.63**. Division by √dₖ gives 1 at every size. Division by dₖ gives 1/√dₖ, **0.044** at dₖ = 512: nearly nothing is left.""",
    ),
    Exercise(
        name="saturation",
        question="""\
## 2. Where does softmax saturate?

Take softmax([x, 0, 0, 0]) and let x grow from 0 to 10. From which x on is it saturated? First say what you mean by "saturated".""",
        guess="x at which 5% of 1 − Σp² is left, for softmax([x, 0, 0, 0])",
        function="share_left",
        head="""\
def share_left(x):
    \"\"\"Return 1 − Σp² of p = softmax([x, 0, 0, 0]), divided by its value at x = 0.\"\"\"
""",
        gap="""\
    share = ...
    return share""",
        solution="""\
    p = np.exp([x, 0.0, 0.0, 0.0])
    p /= p.sum()
    return (1 - (p**2).sum()) / 0.75""",
        hint="Write softmax with `np.exp` and a sum. At x = 0 all four weights are ¼.",
        code=(
            """\
for x in (0, 1, 2, 4, 5, 6, 10):
    p = sqrtdk.softmax(np.array([x, 0.0, 0.0, 0.0]))
    print(f"x {x:2}: weights {np.round(p, 4)}, left to learn with 1 − Σp² = {1 - (p**2).sum():.4f}")""",
            """\
saturation = exercises.saturation()
print(saturation.reading[0], saturation.reading[2], sep="\\n")
figure(saturation)""",
        ),
        answer="""\
A definition that speaks of learning: training moves the scores through the softmax Jacobian, whose trace is 1 − Σp². Call the row saturated when 5% of the
trace at x = 0 is left. That is at x = **5.043**; the first weight is **0.9810** there. Other definitions give other points (the third panel), between
**4.04** and **5.65**. Only "float32 cannot tell the weight from 1" takes longer: x = **16.6**.""",
    ),
    Exercise(
        name="rescale",
        question="""\
## 3. Does a model learn without the scale?

Train a small attention model on a recall task with 1/√dₖ and without. Then with no scaling and a rescaled init (`rescaled`): W_q and W_k begin smaller, so
that at the first step this model computes the very function of the scaled one. What does the comparison say about the cause?""",
        guess="factor that the scores need at dₖ = 64",
        function="rescale",
        head="""\
def rescale(W_q, W_k):
    \"\"\"Return both matrices, shape [width, dₖ], so that no division gives the scores that 1/√dₖ gave before.\"\"\"
""",
        gap="""\
    smaller_W_q = ...
    smaller_W_k = ...
    return smaller_W_q, smaller_W_k""",
        solution="""\
    d_k = W_q.shape[1]
    return W_q * d_k**-0.25, W_k * d_k**-0.25""",
        hint="The scores are products of one row that W_q made and one row that W_k made. Which factor on each gives 1/√dₖ on the product?",
        code=(
            """\
from sqrtdk import lab

spec = lab.AblationSpec(scales=("none", "sqrt"), also=(("none", "rescaled"),), seeds=3)
with lab.Lab() as place:
    ablation = lab.ablate(spec, place)
for row in ablation.tables["summary"]:
    print(
        f"{row['scale']:4} ({row['init']} init): median loss {row['final_loss_median']:.2f}, "
        f"solved {row['solved_fraction']:.0%} of {row['n']}"
    )
figure(ablation)""",
        ),
        answer="""\
Without the scale **0%** of the runs learn: the loss stays near ln 16 = 2.77, that of guessing. With 1/√dₖ **100%** solve the task. But so do those without
the scale whose weights began smaller (W_q and W_k × dₖ^−¼). So it is not the missing division as such; it is the size of the scores at the start. The division is the
simplest way to get that size right at every dₖ.""",
        trains=True,
        note="""\
The cell trains nine models: about a minute on two cores. Three seeds show which way it goes; sixteen seeds, three widths and six learning rates are in
[the experiments](experiments.md).""",
    ),
    Exercise(
        name="temperature",
        question="""\
## 4. What does a temperature do?

Divide by τ = ½·√dₖ, √dₖ and 2·√dₖ in place of √dₖ. How do the patterns differ? Which rows are sharper, and is a sharper row one that learns less?""",
        guess="effective keys of 32 at τ = ½·√dₖ, where √dₖ gives 15",
        function="weights",
        head="""\
def weights(q, k, tau):
    \"\"\"Return the attention weights, shape [queries, keys], of scores that are divided by the temperature tau.\"\"\"
""",
        gap="""\
    p = ...
    return p""",
        solution="""\
    p = np.exp(q @ k.T / tau)
    return p / p.sum(axis=1, keepdims=True)""",
        hint="Each row belongs to one query. Its weights add up to 1.",
        code=(
            """\
q, k, v = np.random.default_rng(1).standard_normal((3, 256, 64))
for t in (0.5, 1.0, 2.0):
    rows = sqrtdk.attention(q, k, v, scale=f"temperature:{t}").statistics
    print(
        f"τ = {t:3}·√dₖ: entropy ratio {rows.mean('entropy_ratio'):.2f}, "
        f"largest weight {rows.mean('max_weight'):.3f}, {rows.mean('effective_keys'):.0f} effective keys of 256"
    )""",
            """\
temperature = exercises.temperature()
print(*temperature.reading[:4], sep="\\n")
figure(temperature)""",
        ),
        answer="""\
A smaller τ makes rows sharper, a larger one softer; the keys keep their order. With 32 keys the entropy ratio goes from **0.617** to **0.870** and **0.965**. The sharper
row has the *larger* mean gradient at its query (**4.35** against **0.75**), although its 1 − Σp² is smaller: the scale that makes it sharp multiplies the
gradient, too.""",
    ),
    Exercise(
        name="gradient",
        question="""\
## 5. Do gradients vanish?

Look at ∂softmax/∂input for uniform and for peaked weights. Then measure ‖∂loss/∂q‖ for attention without a scale, with 1/√dₖ and with 1/dₖ. Do gradients vanish
without the scale?""",
        guess="mean gradient without scaling, as a multiple of that with 1/√dₖ (dₖ = 64, n = 1024)",
        function="query_gradient",
        head="""\
def query_gradient(q, k, v, grad_output, scale):
    \"\"\"Return ∂loss/∂q of one query: q [dₖ], k [n, dₖ], v [n, dᵥ], grad_output = ∂loss/∂output [dᵥ].\"\"\"
""",
        gap="""\
    gradient = ...
    return gradient""",
        solution="""\
    p = sqrtdk.softmax(scale * k @ q)
    jacobian = np.diag(p) - np.outer(p, p)
    return scale * k.T @ jacobian @ v @ grad_output""",
        hint="The output is Σ p·v, p = softmax(s), s = scale·k·q. Go backwards: ∂loss/∂p, then the Jacobian diag(p) − p·pᵀ, then s.",
        code=(
            """\
for name, s in {"uniform": [0.25] * 4, "healthy": [0.3, 0.3, 0.2, 0.2], "peaked": [0.97, 0.01, 0.01, 0.01]}.items():
    jacobian = theory.softmax_jacobian(np.array(s))
    print(f"{name:8} diagonal {np.round(np.diag(jacobian), 4)}, trace {np.trace(jacobian):.4f}")""",
            """\
gradients = exercises.gradients(d_ks=(64, 512), ns=(16, 1024))
for row in gradients.tables["vanish"]:
    print(
        f"dₖ {row['d_k']:3}, n {row['n']:4}, {row['scale']:7}: ‖∂loss/∂q‖ mean {row['grad_q_mean']:.3g}, "
        f"median {row['grad_q_median']:.3g}, 5th percentile {row['grad_q_p5']:.1g}"
    )
figure(gradients)""",
        ),
        answer="""\
The Jacobian does what the four sources say: its trace falls from **0.7500** to **0.0588** for the peaked row, and to 0 for a one-hot one. But ∂loss/∂q is the Jacobian *times* the scale and
the keys. At dₖ = 64, n = 1024 the mean gradient is **13.9** without a scale and **0.4** with 1/√dₖ: larger, not smaller. What goes wrong shows at dₖ = 512,
n = 16: the median row has **0.127** without a scale against **6.07**, and one row in twenty has **8e-11** or less. Gradients become *uneven*: most rows
learn nothing and a few get everything. The smallest gradients on average are those of 1/dₖ.""",
    ),
)
"""In their order."""
