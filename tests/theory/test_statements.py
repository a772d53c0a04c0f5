"""The list of statements, and the page that is made from it."""

from benchmarks.theory import fedacs, fedagg, fedclup, fedpd, fedslr
from benchmarks.theory.statements import FAILS, HOLDS, PAGE, PART, STATEMENTS, counts, page


def test_the_page_is_made_from_the_list():
    assert PAGE.read_text() == page()
    assert counts() in (PAGE.parents[1] / "papers" / "index.md").read_text()


def test_all_statements_are_there():
    """FedSLR: Theorems 1 to 3. FedCLUP: Theorems 1 to 3, Corollaries 1 to 4. FedAgg: Theorems and
    Propositions 1 to 5. FedACS: Theorem 2.1. FedPD: Theorems 1 to 3, Claims 2.1, 2.2, D.1, D.2."""
    numbers = [statement.paper for statement in STATEMENTS]
    expected = {"FedSLR": 3, "FedCLUP": 7, "FedAgg": 10, "FedACS": 1, "FedPD": 7}
    assert {paper: numbers.count(paper) for paper in expected} == expected
    assert len(numbers) == sum(expected.values())
    assert len({(statement.paper, statement.number) for statement in STATEMENTS}) == len(numbers)


def test_every_statement_has_a_bound_of_its_paper_a_reason_and_a_test():
    modules = {"FedSLR": fedslr, "FedCLUP": fedclup, "FedAgg": fedagg, "FedACS": fedacs}
    modules["FedPD"] = fedpd
    for statement in STATEMENTS:
        assert statement.verdict in (HOLDS, PART, FAILS)
        assert statement.why
        assert statement.tests
        assert len(statement.says.split()) <= 8, statement.says
        names = {bound.__module__ for bound in statement.bounds}
        assert names == {modules[statement.paper].__name__}
