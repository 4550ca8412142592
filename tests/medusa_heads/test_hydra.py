from __future__ import annotations

import pytest
import torch

from medusa_heads.config import HydraConfig
from medusa_heads.errors import ConfigError, HeadsError
from medusa_heads.families import load_heads
from medusa_heads.hydra import HydraHeads
from medusa_heads.medusa import MedusaHeads
from tests.conftest import FAMILIES, tiny_base


def shaken(heads):
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return heads


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_new_heads_say_what_the_base_says(family, prefix):
    base = tiny_base(family)
    heads = HydraHeads.for_base(base, num_heads=3, num_layers=2, prefix_attention=prefix)
    ids = torch.randint(3, 90, (2, 9))
    states = base.forward(ids).last_hidden_state
    read = heads.prefix(states, torch.arange(9).expand(2, 9)) if prefix else states
    out = heads(read, base.embed(torch.randint(3, 90, (2, 9, 3))))
    assert out.shape == (3, 2, 9, base.hidden_size)
    for guess in heads.head_logits(out, base):
        torch.testing.assert_close(guess, base.project(states), rtol=1e-4, atol=1e-4)


def test_head_i_reads_the_state_and_i_plus_one_embeddings():
    base = tiny_base()
    heads = shaken(HydraHeads.for_base(base, num_heads=3, num_layers=2))
    states, embeddings = torch.randn(5, 32), torch.randn(5, 3, 32)
    out = heads(states, embeddings)
    for i in range(3):
        torch.testing.assert_close(out[i], heads.head(i, states, embeddings[:, : i + 1]))
        for j in range(3):
            other = embeddings.clone()
            other[:, j] += 1
            assert torch.equal(heads(states, other)[i], out[i]) == (j > i)


def test_the_first_block_by_hand():
    heads = shaken(HydraHeads(HydraConfig(hidden_size=2, vocab_size=5, num_heads=2)))
    block = heads.heads[1][0]
    z = torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0, 2.0])
    inner = block.linear.weight @ z + block.linear.bias
    wanted = block.res_connection.weight @ z + inner / (1 + torch.exp(-inner))
    torch.testing.assert_close(heads.head(1, z[:2], z[2:].view(2, 2)), wanted)


def test_prefix_attention_with_a_cache_equals_one_pass():
    from transformers import DynamicCache

    base = tiny_base("qwen3")
    prefix = shaken(HydraHeads.for_base(base, prefix_attention=True)).prefix
    states, positions = torch.randn(1, 7, 32), torch.arange(7)[None]
    whole = prefix(states, positions)
    cache = DynamicCache()
    first = prefix(states[:, :4], positions[:, :4], None, cache)
    visible = torch.arange(7) <= torch.arange(4, 7)[:, None]
    rest = prefix(states[:, 4:], positions[:, 4:], visible[None], cache)
    torch.testing.assert_close(torch.cat((first, rest), 1), whole)


@pytest.mark.parametrize("options", [{}, {"prefix_attention": True}, {"own_projection": True, "num_layers": 3}])
def test_saved_heads_come_back_and_other_families_are_refused(tmp_path, options):
    base = tiny_base()
    heads = shaken(HydraHeads.for_base(base, num_heads=2, draft_ids=torch.tensor([7, 3, 20]), **options))
    heads.save_pretrained(tmp_path / "h", dtype=None)
    loaded = load_heads(tmp_path / "h", base=base)
    assert isinstance(loaded, HydraHeads) and loaded.config == heads.config
    for key, value in heads.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value)
    states = loaded(torch.randn(2, 32), torch.randn(2, 2, 32))
    assert loaded.head_logits(states, base).shape == (2, 2, 3)
    torch.testing.assert_close(loaded.head_logits(states[1:], base, first=1)[0], loaded.head_logits(states, base)[1])
    with pytest.raises(HeadsError, match="holds hydra heads"):
        MedusaHeads.from_pretrained(tmp_path / "h")
    with pytest.raises(HeadsError, match="belong to another base"):
        HydraHeads.from_pretrained(tmp_path / "h", base=tiny_base("gemma"))


def test_parameters_are_counted():
    heads = HydraHeads(HydraConfig(hidden_size=8, vocab_size=50, num_heads=3, num_layers=2))
    entries = sum(2 * (2 + i) * 64 + 8 for i in range(3))
    assert heads.num_parameters == entries + 3 * (64 + 8)


def test_a_layer_without_prefix_attention_is_refused():
    with pytest.raises(ConfigError, match="both or neither"):
        HydraConfig(hidden_size=8, vocab_size=50, prefix_attention=True)
