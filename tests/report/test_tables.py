"""Tables as Markdown, text, LaTeX and CSV, and those of a paper."""

from pfl.report import comparison_tables as tables
from pfl.report.comparison import ComparedRuns
from pfl.report.table import Column, Estimate, Table, csv, escape, latex, markdown, text
from tests.refusal import refused
from tests.report.test_comparison import run


def test_a_table_in_markdown_text_and_latex():
    cells = Table(["method", "a_b"], [["FedAvg", "50% ± 1"]])
    assert markdown(cells) == "| method | a_b |\n|---|---|\n| FedAvg | 50% ± 1 |\n"
    assert text(cells).splitlines()[2] == "FedAvg  50% ± 1"
    shown = latex(cells)
    assert r"method & a\_b \\" in shown and r"FedAvg & 50\% $\pm$ 1 \\" in shown
    assert r"\begin{tabular}{@{}lr@{}}" in shown and r"\bottomrule" in shown
    assert markdown(Table(["a|b"])).startswith(r"| a\|b |")
    assert escape("x^2 ~ {a}\\") == r"x\^{}2 \~{} \{a\}\textbackslash{}"


def test_a_row_of_latex_is_no_option_of_the_command_before_it():
    r"""`\\[...]` is a distance, `\\*` a row that stays on the page, `\midrule[...]` a thickness."""
    table = Table(["[a]", "b"], [["[12] Ours", 1.0], ["*Ours", 0.5], ["Ours*", "[1, 2]"]])
    lines = [line for line in latex(table).splitlines() if "&" in line]
    assert lines == [
        r"{}[a] & b \\",
        r"{}[12] Ours & 1.0000 \\",
        r"{}*Ours & 0.5000 \\",
        r"Ours* & [1, 2] \\",
    ]


def test_characters_that_latex_prints_as_others_have_names():
    """The fonts that LaTeX takes without a word print < as ¡, > as ¿ and | as a dash."""
    assert escape("k < 3 | k > 5") == r"k \textless{} 3 \textbar{} k \textgreater{} 5"


def test_latex_for_a_paper():
    """Shares in percent, the best of each column in bold, chosen columns, and means ± std.

    Of 0.5 and 0.7: mean 60, deviation 10 √2 = 14.14; the smaller number of steps is the best.
    """
    columns = ["method", Column("score", ".4f", True, is_share=True), Column("steps", ".0f", False)]
    rows = [["A_1", Estimate(0.5, 0.01), 3], ["B", Estimate(0.7), 4], ["C", None, None]]
    table = Table([*columns, "notes"], [[*row, "x"] for row in rows], "A & B", "tab:ab")
    lines = latex(table, percent=True, mean=True, columns=["method", "score", "steps"]).splitlines()
    assert lines[:4] == [r"\begin{table}", r"\centering", r"\caption{A \& B}", r"\label{tab:ab}"]
    assert lines[6:] == [
        r"method & score (\%) & steps \\",
        r"\midrule",
        r"A\_1 & 50.00 $\pm$ 1.00 & \textbf{3} \\",
        r"B & \textbf{70.00} & 4 \\",
        r"C & -- & -- \\",
        r"\midrule",
        r"mean $\pm$ std & 60.00 $\pm$ 14.14 & 4 $\pm$ 1 \\",
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    with refused("columns: 'other'", "method or score or steps or notes"):
        latex(table, columns=["other"])


def test_a_title_is_escaped_in_latex():
    comparison = ComparedRuns([run("A", 0, [0.5])], "A", title="% a\n\\input{b}")
    caption = next(
        line for line in latex(tables.score_table(comparison)).splitlines() if "caption" in line
    )
    assert caption.startswith(r"\caption{\% a \textbackslash{}input\{b\}. The score is accuracy.")


def test_a_table_as_csv_has_exact_numbers():
    table = Table(["method", "score"], [["=A1", Estimate(1 / 3, 0.5)], ["-", Estimate(0.5)]])
    assert csv(table).decode().splitlines() == [
        "method,score,score std",
        "'=A1,0.3333333333333333,0.5",
        "'-,0.5,",
    ]


def test_the_columns_of_a_paper_stand_beside_each_other_for_two_data_sets():
    """A's seeds at x: mean (0.5 + 0.7) / 2 = 0.6, deviation 0.1 √2 = 0.141; the worst: a half.

    B is better there; at y, where B is missing, A's 0.9 has nothing to be better than.
    """
    at_x = [run("A", 0, [0.5]), run("A", 1, [0.7]), run("B", 0, [0.8])]
    at_y = [run("A", 0, [0.9])]
    points = [ComparedRuns(at_x, "A", title="x"), ComparedRuns(at_y, "A", title="y")]
    table = tables.paper_table(points, ["percent", "score", "worst", "gradients"])
    heads = ("accuracy", "worst 10%", "gradients")
    assert table.cells == [
        ["method", *heads, *heads],
        ["A", "60.0 ± 14.1", "30.0 ± 7.1", "10", "90.0", "45.0", "10"],
        ["B", "80.0", "40.0", "10", "–", "–", "–"],
    ]
    assert "in %, mean ± sample standard deviation over seeds" in table.caption
    lines = latex(table, wide=True).splitlines()
    # The columns 2 to 4 are x's, and 5 to 7 are y's.
    place = lines.index(r" & \multicolumn{3}{c}{x} & \multicolumn{3}{c}{y} \\")
    assert lines[place + 1] == r"\cmidrule(lr){2-4} \cmidrule(lr){5-7}"
    assert lines[place + 2].startswith("method & accuracy & worst 10")
    assert lines[0] == r"\begin{table*}" and lines[-1] == r"\end{table*}"
    assert sum(r"\textbf{80.0}" in line for line in lines) == 1
    assert sum(r"\textbf" in line for line in lines) == 1


def test_one_column_of_a_paper_has_the_name_of_the_score_or_of_the_data_set():
    points = [ComparedRuns([run("A", 0, [0.5])], "A", title=title) for title in "xy"]
    assert tables.paper_table(points[:1], ["score"]).cells == [
        ["method", "accuracy"],
        ["A", "0.5000"],
    ]
    assert tables.paper_table(points, ["score"]).heads == ["method", "x", "y"]
    with refused("compare: --latex: scores", "percent, score, worst", "MB up"):
        tables.paper_table(points, ["percent", "scores"])
