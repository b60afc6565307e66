"""No result is typed by hand: what the check refuses, and what structure it lets pass."""

import pytest

from hybridpar.artifacts.prose import notebook_faults, typst_faults


@pytest.mark.parametrize(
    "text",
    [
        "The hybrid is 3.2 times faster.",
        "Throughput rises by 12%.",
        "Throughput rises to 1,200 tokens per second.",
        "It is twice as fast.",
        "Pipelines need half the memory.",
        "It runs three times faster.",
        "The ratio is $3$.",
        "A gain of $12 times$ was seen.",
        "The constant is $alpha = 3.5$.",
        '#figure(image("a.pdf"), caption: [8 ranks reach 300 tokens/s])',
    ],
)
def test_a_typed_result_in_the_paper_is_a_fault(text: str) -> None:
    assert typst_faults(text)


@pytest.mark.parametrize(
    "text",
    [
        "We train Mamba-2 under ZeRO-1/2/3, FSDP2 and 1F1B in fp32 (hypothesis H3, question E4).",
        '#num("single.best.8.text") tokens per second @zero2020 <sec:one>',
        "The ring moves $2 (p - 1) / p$ of the message, and $6 N D$ FLOPs.",
        "#set text(size: 9.5pt)\n#set page(margin: 2.2cm, columns: 2)",
        "// 12 is fine in a comment",
        '#figure(image("figures/hybrid-8.pdf", width: 100%))',
    ],
)
def test_structure_passes(text: str) -> None:
    assert not typst_faults(text)


def test_a_fault_names_its_line() -> None:
    (fault,) = typst_faults("fine\nfine `a\nb`\nfaster by 7", "study.typ")

    assert (fault.path, fault.line, fault.text) == ("study.typ", 4, "7")
    assert "study.typ:4" in str(fault)


def test_notebook_prose_and_sentences_in_code_are_checked_but_code_is_not() -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# Which wins?\n", "`dp2` won by 12 tokens/s."]},
        {"cell_type": "code", "source": "say('a gain of 12 tokens')"},
        {"cell_type": "code", "source": "rows = table[:12]\nname = 'fig-01'"},
    ]

    assert [fault.text for fault in notebook_faults(cells)] == ["12", "12"]
