"""Two tokenizers over one text: against owners of single characters, counted one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from kvmap.errors import UnknownName
from kvmap.fit.features import geometry_shape
from kvmap.mappers.identity import IdentityMapper
from kvmap.models.alignment import ALIGNMENT_RULES, AlignedIds, Alignment, AlignmentError, take_columns
from kvmap.models.capture import forward, prefill
from kvmap.models.loaded import LoadedModel
from kvmap.models.pair import ALIGNMENTS, ModelPair
from kvmap.models.rope import apply_rotation, strip_rotation
from kvmap.models.tokenization import TokenizerMismatch
from kvmap.transfer import transfer
from tests.models.tiny_tokenizers import byte_level_tokenizer
from tests.tiny_random_models import FAMILIES

COARSE = (("t", "h"), ("th", "e"), ("i", "n"), ("Ġ", "the"), ("Ġthe", "r"), ("Ġ", "r"), ("a", "in"))
OTHER = (("h", "e"), ("r", "a"), ("ra", "in"), ("i", "n"), ("Ġ", "t"), ("Ġt", "he"), ("e", "r"))
TEXT = "the rain in there, then the thin train  in the thing"


def bpe(merges, **settings) -> PreTrainedTokenizerFast:
    return byte_level_tokenizer(merges, words=["".join(merge) for merge in merges], **settings)


TOKENIZERS = {"bytes": bpe(()), "coarse": bpe(COARSE), "other": bpe(OTHER)}


def aligned_row(alignment: Alignment, ids: list[int]) -> tuple[list[int], list[range]]:
    """The source's ids, and the source columns of each target token, of one row."""
    found = alignment.align(torch.tensor([ids]), torch.ones(1, len(ids)))
    runs = zip(found.first[0].tolist(), found.last[0].tolist(), strict=True)
    return found.ids[0].tolist(), [range(first, last + 1) for first, last in runs]


def owners(tokenizer, ids: list[int]) -> list[int]:
    """For each character of an ASCII text the number of the token that holds it."""
    return [number for number, token in enumerate(ids) for _ in tokenizer.decode([token])]


def expected(source_owner: list[int], target_owner: list[int], rule: str) -> list[range]:
    """What each target token takes, by looking at every character."""
    ends = [
        place for place, owner in enumerate(source_owner) if source_owner[place + 1 : place + 2] != [owner]
    ]
    runs = []
    for token in dict.fromkeys(target_owner):
        held = [place for place, owner in enumerate(target_owner) if owner == token]
        touched = {source_owner[place] for place in held}
        if rule == "last":
            runs.append(range(source_owner[held[-1]], source_owner[held[-1]] + 1))
        elif rule == "mean":
            runs.append(range(min(touched), max(touched) + 1))
        else:
            ended = [source_owner[end] for end in ends if end <= held[-1]]
            runs.append(range(max(ended, default=0), max(ended, default=0) + 1))
    return runs


@pytest.mark.parametrize("rule", ALIGNMENT_RULES)
@pytest.mark.parametrize("target", TOKENIZERS)
@pytest.mark.parametrize("source", TOKENIZERS)
def test_every_token_takes_what_its_characters_say(source, target, rule):
    source, target = TOKENIZERS[source], TOKENIZERS[target]
    ids = target(TEXT)["input_ids"]
    theirs, runs = aligned_row(Alignment(source, target, rule), ids)
    assert theirs == source(TEXT)["input_ids"]
    assert runs == expected(owners(source, theirs), owners(target, ids), rule)


def test_the_rules_differ_where_a_source_token_reaches_beyond_a_target_token():
    source, target = TOKENIZERS["coarse"], TOKENIZERS["bytes"]
    ids = target("in the")["input_ids"]  # source: "in", " the"
    rows = {rule: aligned_row(Alignment(source, target, rule), ids)[1] for rule in ALIGNMENT_RULES}
    assert [run.start for run in rows["last"]] == [0, 0, 1, 1, 1, 1]
    assert [run.start for run in rows["ended"]] == [0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("text", ["Größe, naïve: 日本語 и щётка", "👩‍👩‍👧 then 🏳️‍🌈!", "a\n\n\tb  \n"])
@pytest.mark.parametrize("names", [("bytes", "coarse"), ("coarse", "bytes"), ("coarse", "other")])
def test_every_character_is_read_whole_before_a_token_that_ends_with_it(names, text):
    source, target = (TOKENIZERS[name] for name in names)
    ids = target(text)["input_ids"]
    theirs, runs = aligned_row(Alignment(source, target, "last"), ids)
    assert source.decode(theirs) == text
    for place, run in enumerate(runs):
        read = source.decode(theirs[: run.stop])
        assert "�" not in read
        assert read.startswith(target.decode(ids[: place + 1]).rstrip("�"))


def test_special_tokens_take_their_namesakes_and_what_stands_before_the_text():
    source, target = bpe((), add_bos=True), bpe(COARSE, add_bos=True)
    bos, end, pad = target.bos_token_id, target.eos_token_id, target.pad_token_id
    ids = [*target("in")["input_ids"], end, *target("in", add_special_tokens=False)["input_ids"], pad]
    theirs, runs = aligned_row(Alignment(source, target, "last"), ids)
    letters = source("in", add_special_tokens=False)["input_ids"]
    assert theirs == [bos, *letters, end, *letters, pad]
    assert [run.start for run in runs] == [0, 2, 3, 5, 6]


def test_special_tokens_take_their_role_where_names_differ_else_their_name_as_text():
    source = byte_level_tokenizer()
    target = bpe(COARSE, bos_token="[B]", eos_token="[E]", additional_special_tokens=["[in]"])
    ids = [target.bos_token_id, *target("in")["input_ids"], *target("[in][E]")["input_ids"]]
    theirs, runs = aligned_row(Alignment(source, target, "last"), ids)
    spelled = source("[in]")["input_ids"]
    one = source("in")["input_ids"]
    assert theirs == [source.bos_token_id, *one, *spelled, source.eos_token_id]
    assert [run.start for run in runs] == [0, len(one), len(one) + len(spelled), len(theirs) - 1]


def test_a_target_bos_takes_the_first_token_of_a_source_without_one():
    theirs, runs = aligned_row(
        Alignment(bpe(()), bpe(COARSE, add_bos=True)), [1, *TOKENIZERS["coarse"]("in")["input_ids"]]
    )
    assert len(theirs) == 2
    assert [run.start for run in runs] == [0, 1]


def test_ids_that_their_text_would_not_give_again_keep_their_own_spans():
    source, target = TOKENIZERS["coarse"], TOKENIZERS["coarse"]
    letters = [target.convert_tokens_to_ids(letter) for letter in "the"]
    cut = target("ö")["input_ids"][:1]
    theirs, runs = aligned_row(Alignment(source, target, "last"), [*letters, *cut])
    assert source.decode(theirs) == "the�"
    assert [run.start for run in runs][:3] == [0, 0, 0]
    assert runs[3].start == len(theirs) - 1


def test_offsets_that_leave_out_white_space_change_nothing():
    trimmed = bpe((("\u010a", "\u010a"), (",", "\u010a"), ("i", "n")))
    trimmed.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    plain = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(trimmed.backend_tokenizer.to_str()))
    trimmed.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    ids = trimmed("in,\nin\n\nin")["input_ids"]
    found = [aligned_row(Alignment(bpe(()), tokenizer), ids) for tokenizer in (trimmed, plain)]
    assert found[0] == found[1]
    assert [run.start for run in found[0][1]] == [1, 3, 5, 7, 9]  # "in" ",\n" "in" "\n\n" "in"


def test_rows_of_a_padded_batch_are_aligned_as_alone():
    alignment = Alignment(TOKENIZERS["bytes"], TOKENIZERS["coarse"], "mean")
    rows = [TOKENIZERS["coarse"](text)["input_ids"] for text in ("in", TEXT)]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    found = alignment.align(ids, mask)
    for row, own in enumerate(rows):
        theirs, runs = aligned_row(alignment, own)
        shift = found.ids.shape[1] - len(theirs)
        assert found.ids[row, found.mask[row]].tolist() == theirs
        assert found.first[row, width - len(own) :].tolist() == [run.start + shift for run in runs]
        assert found.last[row, width - len(own) :].tolist() == [run.stop - 1 + shift for run in runs]
        assert found.first[row, : width - len(own)].eq(0).all()


# caches


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3_longrope"])
def test_columns_are_the_mean_of_content_keys_and_values_turned_to_their_own_positions(family):
    model = LoadedModel.from_model(FAMILIES[family](), None)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]).bool()
    kv = prefill(model, torch.randint(3, 60, (2, 5)), mask)
    own = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]).bool()
    runs = [[(0, 0), (2, 2), (3, 4), (4, 4)], [(0, 2), (2, 2), (2, 2), (1, 4)]]
    first, last = (torch.tensor([[run[side] for run in row] for row in runs]) for side in (0, 1))
    positions = torch.tensor([[0, 0, 1, 2], [0, 1, 2, 3]])
    found = take_columns(kv, AlignedIds(torch.zeros(2, 5).long(), mask, first, last), positions, own)
    assert not found.exact
    assert found.owner == kv.owner
    assert torch.equal(found.mask, own)
    assert torch.equal(found.positions, positions)
    for layer, rotation in enumerate(kv.rotations):
        for row, column in own.nonzero().tolist():
            start, stop = runs[row][column][0], runs[row][column][1] + 1
            at = kv.positions[row : row + 1, start:stop]
            content = strip_rotation(kv.keys[layer][row : row + 1, :, start:stop].double(), at, rotation)
            there = positions[row : row + 1, column : column + 1]
            key = apply_rotation(content.mean(2, keepdim=True), there, rotation)
            value = kv.values[layer][row, :, start:stop].double().mean(1)
            torch.testing.assert_close(
                found.keys[layer][row, :, column].double(), key[0, :, 0], atol=2e-5, rtol=0
            )
            torch.testing.assert_close(found.values[layer][row, :, column].double(), value, atol=1e-6, rtol=0)
        assert found.keys[layer][0, :, 0].eq(0).all()
        assert found.values[layer][0, :, 0].eq(0).all()


def words(order) -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate(["<unk>", "</s>", *order])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


@pytest.fixture(scope="module")
def renumbered() -> tuple[LoadedModel, LoadedModel]:
    """One model under two numberings of the same tokens: nothing else about it differs."""
    order = [f"w{number}" for number in range(40)]
    one = FAMILIES["llama"](vocab_size=42, tie_word_embeddings=False)
    other = FAMILIES["llama"](vocab_size=42, tie_word_embeddings=False)
    other.load_state_dict(one.state_dict())
    moved = torch.cat((torch.arange(2), torch.arange(41, 1, -1)))
    other.model.embed_tokens.weight.data = one.model.embed_tokens.weight.data[moved]
    return LoadedModel.from_model(other, words(order[::-1])), LoadedModel.from_model(one, words(order))


def test_a_source_that_numbers_the_same_tokens_otherwise_gives_the_same_cache_bit_for_bit(renumbered):
    pair = ModelPair(*renumbered, alignment="spans")
    ids = torch.randint(2, 42, (3, 12))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    ours, theirs = prefill(pair.source, ids, mask), prefill(pair.target, ids, mask)
    for one, other in zip((*ours.keys, *ours.values), (*theirs.keys, *theirs.values), strict=True):
        real = mask.bool()[:, None, :, None]
        assert torch.equal(one * real, other * real)


def test_the_identity_mapper_between_two_numberings_gives_native_logits(renumbered):
    pair = ModelPair(*renumbered, alignment="spans")
    ids = torch.randint(2, 42, (2, 12))
    shape = geometry_shape(pair.target_geometry)
    handed = transfer(prefill(pair.source, ids), IdentityMapper(shape, shape), pair.target, ids)
    native = forward(pair.target, ids, None)[0][:, -1]
    torch.testing.assert_close(handed.logits, native, atol=1e-4, rtol=0)


def test_equal_tokenizers_are_not_aligned(renumbered):
    pair = ModelPair(renumbered[1], renumbered[1], alignment="spans")
    assert pair.alignment is None
    assert pair.source.alignment is None


# refusals


def test_different_tokenizers_are_refused_by_default_with_the_way_to_align_them(renumbered):
    with pytest.raises(TokenizerMismatch, match=r"set pair.alignment=spans, which is experimental"):
        ModelPair(*renumbered).check()


def test_an_aligned_source_does_not_go_on_from_its_cache(renumbered):
    pair = ModelPair(*renumbered, alignment="spans")
    ids = torch.randint(2, 42, (1, 6))
    with pytest.raises(AlignmentError, match="cannot go on from it or score the target's tokens"):
        forward(pair.source, ids, prefill(pair.source, ids))
    for settings in ({"n_layers": 1}, {"length": 8}, {"on_layer": lambda *_: None}):
        with pytest.raises(AlignmentError, match="leave length, n_layers and on_layer out"):
            prefill(pair.source, ids, **settings)


def test_an_unknown_token_is_refused(renumbered):
    pair = ModelPair(*renumbered, alignment="spans")
    with pytest.raises(AlignmentError, match="unknown token, whose text is lost"):
        prefill(pair.source, torch.tensor([[3, 0, 4]]))


def test_text_that_the_source_does_not_see_is_refused():
    with pytest.raises(AlignmentError, match="makes no token of the text of 1 target tokens"):
        aligned_row(Alignment(words(["w1"]), TOKENIZERS["bytes"]), TOKENIZERS["bytes"](" ")["input_ids"])


def test_a_tokenizer_without_offsets_is_refused():
    class Slow:
        pass

    with pytest.raises(AlignmentError, match="source's tokenizer, Slow, gives no character offsets"):
        Alignment(Slow(), TOKENIZERS["bytes"])


def test_a_model_without_a_tokenizer_is_refused(renumbered):
    bare = replace(renumbered[0], tokenizer=None)
    with pytest.raises(AlignmentError, match=r"pair.alignment=spans needs both tokenizers"):
        ModelPair(bare, renumbered[1], alignment="spans").check()


def test_unknown_names_are_refused(renumbered):
    with pytest.raises(UnknownName, match="spams"):
        ModelPair(*renumbered, alignment="spams")
    with pytest.raises(UnknownName, match="lst"):
        ModelPair(*renumbered, alignment="spans", alignment_rule="lst")
    with pytest.raises(UnknownName, match="lst"):
        Alignment(TOKENIZERS["bytes"], TOKENIZERS["bytes"], "lst")


def test_the_configuration_knows_the_same_names_and_refuses_what_cannot_be_asked():
    from kvmap.config import schema
    from kvmap.config.alignment_rules import alignment_mistakes

    assert (schema.ALIGNMENTS, schema.ALIGNMENT_RULES) == (ALIGNMENTS, ALIGNMENT_RULES)
    cfg = schema.Config()
    cfg.stages, cfg.evaluation.arms = ["evaluate", "benchmark"], ["target", "source", "mapped", "no_context"]
    cfg.evaluation.conversation.limit, cfg.evaluation.relay.hops = 3, 2
    assert list(alignment_mistakes(cfg)) == []
    cfg.pair.alignment, cfg.pair.alignment_rule = "spans", "lst"
    found = "\n".join(alignment_mistakes(cfg))
    for part in (
        "pair.alignment_rule=lst: expected one of last, ended, mean",
        "benchmark times, have no text; leave that stage out",
        "set evaluation.arms=[target,mapped,no_context]",
        "set evaluation.conversation.limit=0",
        "set evaluation.relay.hops=0",
    ):
        assert part in found
    cfg.pair.alignment = "spams"
    assert "pair.alignment=spams: expected one of refuse, spans" in "\n".join(alignment_mistakes(cfg))
