"""What is changed in SGLang so that a row costs it less has an effect on the installed SGLang."""

import pytest

from tests.engine.forked import run_code

pytestmark = [pytest.mark.engine, pytest.mark.every_version]

LABELS = """
import torch
from sglang.srt.layers import logits_processor, logprob_processor
from enginepool.workers.sglang.patches.scheduler import gather_labels_without_waiting

def picked():
    logits = torch.arange(24.0).view(3, 8).sin()
    processor = logprob_processor.OutputLogprobProcessor()
    found = processor.compute_logprobs_only(logits, [0] * 3, [[1, 2], [7], [3, 4, 5]], lambda logits: logits)
    return found.token_ids_logprobs_val, found.token_ids_logprobs_idx

values, labels = picked()
gather_labels_without_waiting(logprob_processor.OutputLogprobProcessor, logits_processor.LogitsProcessor)
more, same = picked()
assert [one.tolist() for one in values] == [one.tolist() for one in more] and labels == same == [[1, 2], [7], [3, 4, 5]]
assert len({one.untyped_storage().data_ptr() for one in more}) == 1
"""


def test_the_labels_of_all_rows_of_a_forward_are_picked_in_one_piece() -> None:
    status, said = run_code(LABELS)
    assert status == 0, said


ROWS = """
import pickle
from array import array
from sglang.srt.managers import io_struct
from sglang.srt.observability.req_time_stats import APIServerReqTimeStats
from sglang.srt.sampling.sampling_params import SamplingParams
from enginepool.workers.sglang.patches.row_messages import send_shared_fields_once

def row(kind, i, **more):
    return kind(
        rid=f"{i:032x}", input_text=None, input_ids=array("q", [i, i + 1]), mm_inputs=None, token_type_ids=None,
        sampling_params=SamplingParams(max_new_tokens=0), time_stats=APIServerReqTimeStats(), priority=3, **more,
    )

asked = dict(input_embeds=None, return_logprob=True, logprob_start_len=-1, top_logprobs_num=0, stream=False)
generate = [row(io_struct.TokenizedGenerateReqInput, i, token_ids_logprob=[i, 9], **asked) for i in range(64)]
embed = [row(io_struct.TokenizedEmbeddingReqInput, i) for i in range(64)]
kinds = (io_struct.BatchTokenizedGenerateReqInput, generate), (io_struct.BatchTokenizedEmbeddingReqInput, embed)
for message, rows in kinds:
    before = pickle.dumps(message(batch=rows), pickle.HIGHEST_PROTOCOL)
    send_shared_fields_once(message)
    after = pickle.dumps(message(batch=rows), pickle.HIGHEST_PROTOCOL)
    assert 2 * len(after) < len(before), (len(before), len(after))
    found, expected = pickle.loads(after), pickle.loads(before)
    told = vars(expected[0].time_stats).keys()
    for one in (*found, *expected):
        assert vars(one.time_stats).keys() == told
        one.time_stats = None  # each is an object that equals itself alone
    assert found == expected and len(found) == 64
"""


def test_a_batch_of_rows_arrives_as_it_was_sent_in_less_than_half_the_bytes() -> None:
    status, said = run_code(ROWS)
    assert status == 0, said
