"""Token numbers of GPT-2 that anybody knows, from an excerpt of its vocabulary."""

import json

import pytest

from mesascope.tasks.bpe import BPE, EOS

# Number of the token that a merge makes, and the merge: all whose result is a part of one of the words below.
MERGES = """
256 Ġ t; 258 h e; 262 Ġt he; 263 e r; 267 Ġ o; 269 Ġ c; 271 i s; 275 Ġ b; 277 Ġ f; 285 Ġ m; 288 Ġ d;
291 i c; 294 Ġt h; 297 l l; 300 Ġ l; 303 v e; 305 r o; 315 u t; 318 Ġ is; 322 o w; 332 v er; 388 u
m; 400 t h; 417 e l; 421 q u; 464 T he; 466 Ġd o; 474 Ġ j; 519 o g; 593 ow n; 616 Ġm y; 624 ic k;
625 Ġo ver; 627 Ġ qu; 659 o ve; 660 t e; 675 w n; 694 c k; 695 e ll; 709 o v; 808 ro w; 817 T h; 862
p s; 865 Ġb r; 931 um p; 1031 a z; 1133 ut e; 1140 o x; 1169 t he; 1312 Ġ i; 1379 Ġb ro; 1544 H e;
1671 b r; 1820 m y; 2005 Ġc ut; 2053 ro wn; 2068 Ġqu ick; 2502 o ver; 3149 m p; 3290 Ġdo g; 4391 Ġj
ump; 4598 d o; 4772 Ġb row; 5031 l a; 5439 l o; 6513 f o; 7357 z y; 7544 Ġj u; 7586 Ġbro wn; 7957 b
ro; 8142 um ps; 8591 Ġl a; 8968 c ut; 9019 u i; 9703 d og; 10662 Ġ q; 11109 ell o; 11511 Ġf o; 12582
az y; 12621 H el; 12792 f ox; 13779 Ġc ute; 14396 j u; 15496 H ello; 16931 Ġl azy; 18045 Ġj umps;
18798 ll o; 18912 Ġc u; 19643 Ġo v; 21831 Ġf ox; 24209 qu ick; 25367 b row; 27399 c u; 28254 H ell;
31471 Ġo ve; 33282 b rown; 37296 Ġl az; 43327 j ump; 45567 Ġqu i
"""
SENTENCES = {
    "Hello, my dog is cute": [15496, 11, 616, 3290, 318, 13779],
    "The quick brown fox jumps over the lazy dog.": [
        464,
        2068,
        7586,
        21831,
        18045,
        625,
        262,
        16931,
        3290,
        13,
    ],
}


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory) -> BPE:
    """Numbers 0 to 255 are bytes, those that can be printed first; then come merges, in their order; then EOS."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [n for n in range(256) if n not in printed]
    numbers = {chr(n): i for i, n in enumerate(printed)}
    numbers |= {chr(256 + i): len(printed) + i for i, _ in enumerate(others)}
    merges = {
        int(number): merge
        for number, _, merge in (
            entry.strip().partition(" ") for entry in " ".join(MERGES.split()).split(";")
        )
    }
    assert sorted(merges) == list(merges)
    for number in range(256, 50256):
        numbers[merges[number].replace(" ", "") if number in merges else f"not in the excerpt: {number}"] = (
            number
        )
    numbers[EOS] = 50256
    folder = tmp_path_factory.mktemp("gpt2")
    (folder / "encoder.json").write_text(json.dumps(numbers))
    (folder / "vocab.bpe").write_text("\n".join(["#version: 0.2", *merges.values(), ""]), encoding="utf-8")
    return BPE(folder)


@pytest.mark.parametrize("text", SENTENCES)
def test_known_sentences(gpt2, text):
    assert (gpt2.size, gpt2.eos) == (50257, 50256)
    assert gpt2.encode(text).tolist() == SENTENCES[text]
    assert gpt2.decode(SENTENCES[text]) == text
