"""Licences by the spellings that data sets use, and what is refused."""

from __future__ import annotations

import pytest
from pydantic import ValidationError
from rows_of_curation import record

from sixfold_curation.licence import Licence, hub_id, identifier, traits
from sixfold_curation.stage import Decision, Health, decided

SPELLINGS = {
    "Apache-2.0": ["Apache 2.0", "apache-2.0", "Apache License, Version 2.0", "Apache License v2.0",
                   "https://www.apache.org/licenses/LICENSE-2.0"],
    "MIT": ["mit", "MIT License", "The MIT License", "https://opensource.org/licenses/MIT"],
    "CC-BY-4.0": ["CC BY 4.0", "cc-by-4.0", "Creative Commons Attribution 4.0 International"],
    "CC-BY-NC-4.0": ["CC BY-NC 4.0", "cc_by_nc", "https://creativecommons.org/licenses/by-nc/4.0/"],
    "CC-BY-NC-SA-3.0": ["CC BY-NC-SA 3.0", "cc-by-nc-sa-3.0", "CC BY-NC-SA 3.0 IGO"],
    "CC-BY-NC-ND-4.0": ["Creative Commons Attribution-NonCommercial-NoDerivatives 4.0"],
    "CC0-1.0": ["cc0", "CC0 1.0 Universal", "https://creativecommons.org/publicdomain/zero/1.0/"],
    "GPL-3.0": ["GPLv3", "GPL-3.0-or-later", "GNU GPL v3", "gpl-3.0+"],
    "BSD-3-Clause": ["BSD 3-Clause", "bsd-3-clause"],
    "ODbL-1.0": ["odbl", "Open Database License"],
}  # fmt: skip


def judged(stage: Licence, licences: list[object]) -> tuple[list[Decision], Health]:
    return decided(stage, [record(n, "p", "", {"licence": at}) for n, at in enumerate(licences)])


def reasons(stage: Licence, licences: list[object]) -> list[str]:
    return [decision.reason for decision in judged(stage, licences)[0] if not decision.kept]


def test_common_spellings_are_the_same_licence() -> None:
    wrong = {
        text: identifier(text)
        for name, texts in SPELLINGS.items()
        for text in (name, *texts)
        if identifier(text) != name
    }
    assert not wrong


@pytest.mark.parametrize("text", ["other", "cc", "llama3", "", "see README", "CC BY 4.0 and MIT"])
def test_what_is_no_single_known_licence_has_no_identifier(text: str) -> None:
    assert identifier(text) == ""


def test_traits_follow_the_elements_of_creative_commons() -> None:
    assert traits("CC-BY-NC-SA-4.0") == ("non_commercial", "share_alike")
    assert traits("CC-BY-4.0") == ()
    assert traits("GPL-3.0") == ("share_alike",)


def test_the_default_allows_commercial_use_and_changed_copies() -> None:
    licences = ["MIT", "CC BY-NC 4.0", "CC BY-ND 4.0", "CC BY-SA 4.0", "", None, "homemade"]
    decisions, health = judged(Licence(), licences)
    assert [d.kept for d in decisions] == [True, False, False, True, False, False, False]
    assert [d.reason for d in decisions if not d.kept] == [
        "licence_refused", "licence_refused", "licence_missing", "licence_missing",
        "licence_unknown",
    ]  # fmt: skip
    assert "CC-BY-NC-4.0" in decisions[1].note and "non-commercial" in decisions[1].note
    assert health.value == pytest.approx(5 / 7) and not health.alarm


def test_settings_name_licences_in_any_spelling() -> None:
    licences = ["MIT", "apache-2.0", "CC BY-NC 4.0", "GPLv3"]
    assert (
        reasons(Licence(allow=("Apache 2.0", "CC BY NC 4.0")), licences) == ["licence_refused"] * 2
    )
    assert reasons(Licence(refuse=("mit",)), licences) == ["licence_refused"] * 2
    refused = Licence(refuse_traits=("share_alike",))
    assert [d.kept for d in judged(refused, licences)[0]] == [True, True, True, False]


def test_a_row_under_several_licences_must_satisfy_all_or_one_of_them() -> None:
    clash = ["apache-2.0 and cc-by-nc-4.0", ["MIT", "CC BY-ND 4.0"], "MIT, CC-BY-NC-2.0"]
    assert reasons(Licence(), clash) == ["licence_clash"] * 3
    assert reasons(Licence(), ["MIT or CC BY-NC 4.0", "MIT and Apache 2.0"]) == []


def test_rows_without_a_licence_can_be_kept_and_are_still_named() -> None:
    decisions, health = judged(Licence(missing="keep"), ["", "homemade", "CC BY-NC 4.0"])
    assert [d.kept for d in decisions] == [True, True, False]
    assert decisions[0].reason == "licence_missing" and health.figures["licence_missing"] == 1


def test_a_filter_that_rejects_nothing_alarms() -> None:
    assert "0 rows" not in judged(Licence(), [])[1].alarm
    alarm = judged(Licence(), ["MIT", "MIT"])[1].alarm
    assert "none of 2 rows" in alarm and "licence" in alarm


def test_share_alike_licences_that_clash_alarm() -> None:
    alarm = judged(Licence(), ["CC BY-SA 4.0", "GPLv3", "CC BY-NC 4.0"])[1].alarm
    assert "CC-BY-SA-4.0, GPL-3.0" in alarm
    assert not judged(Licence(), ["CC BY-SA 4.0", "CC BY-SA 3.0", ""])[1].alarm


def test_an_unknown_licence_in_the_settings_names_the_nearest() -> None:
    with pytest.raises(
        ValidationError, match=r"'Apache-3.0' is not a licence known here.*Apache-2.0"
    ):
        Licence(allow=("Apache-3.0",))


def test_words_that_forbid_the_use_are_refused_even_if_unknown_licences_are_kept() -> None:
    stated = ["non-commercial research only", "MIT (noncommercial)", "academic use only", "ours"]
    decisions, _ = judged(Licence(missing="keep"), list(stated))
    assert [d.kept for d in decisions] == [False, False, False, True]
    assert {d.reason for d in decisions[:3]} == {"licence_refused"}
    free = Licence(missing="keep", refuse_traits=())
    assert all(d.kept for d in judged(free, list(stated))[0])


@pytest.mark.parametrize(
    "text, hub",
    [
        ("Apache License, Version 2.0", "apache-2.0"),
        ("MIT License", "mit"),
        ("CC BY-SA 3.0", "cc-by-sa-3.0"),
        ("BSD 3-Clause", "bsd-3-clause"),
        ("CC0", "cc0-1.0"),
        ("ODC-By", "odc-by"),
        ("cc-by", ""),  # of which version?
        ("BSD", ""),
        ("GPL", ""),
        ("CC BY 1.0", ""),  # the hub has no id for it
        ("MIT or Apache-2.0", ""),
        ("ours", ""),
    ],
)
def test_the_hub_has_an_id_for_licences_that_are_certain(text: str, hub: str) -> None:
    assert hub_id(text) == hub
