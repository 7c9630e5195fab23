"""Formulas on cases that can be reckoned by hand; that counts and tables are those of the program."""

import dataclasses
import json
import subprocess

import numpy as np
import pytest

import costs
import cpu_costs
import model_shapes
from model_shapes import PUBLIC, Shape, Shares

# 4 layers of K and V of 6 components in 2 heads, 4 query heads; 100 weights, 12 multiply-adds per position.
_TINY = Shape("tiny", 4, 2, 3, 3, 4, True, 100, 100, 12)


@pytest.fixture(name="measured", scope="module")
def _measured() -> costs.Measured:
    return costs.Measured(json.loads(costs.MEASURED.read_text(encoding="utf-8")))


def test_operations_of_whole_planes():
    of = model_shapes.operations(_TINY, Shares(0.5, 0.25, 1.5))
    assert of["components"] == 48 and of["rope_components"] == 24
    # Layers above 0 read 1, 2 and 3 layers of 12 components; V reads 6 of its K beside.
    assert of["input_codes"] == 2 * (12 + 24 + 36) + 3 * 6
    assert of["predict_macs"] == 6 * of["input_codes"]
    assert of["predict_products"] == 36
    assert of["analyze_macs"] == 8 * 36
    assert (of["coded_values"], of["nonzero_values"], of["entropy_steps"]) == (24, 12, 36)
    assert of["add_macs"] == 12 * 6
    # 5 distances, 4 query heads, a mean and 8 factors of 3 dimensions, in 4 layers.
    assert of["importance_scores"] == 80 and of["importance_macs"] == 80 * 9 * 3
    assert of["importance_features"] == 8 * 69


def test_matrices_per_head_take_a_share_of_the_work():
    whole = model_shapes.operations(_TINY, Shares(1, 0.25, 1))
    cut = model_shapes.operations(dataclasses.replace(_TINY, per_head=True), Shares(1, 0.25, 1))
    for kind in ("predict_macs", "analyze_macs", "add_macs"):
        assert cut[kind] == whole[kind] / 2
    assert cut["input_codes"] == whole["input_codes"] and cut["importance_macs"] == whole["importance_macs"]


def test_a_latent_has_one_plane_per_layer_and_few_inputs_read_less():
    latent = Shape("latent", 3, 1, 8, 0, 1, False, 0, 0, 0)
    of = model_shapes.operations(latent, Shares(1, 0, 1))
    assert latent.planes == [8, 8, 8] and of["rope_components"] == 0
    assert of["input_codes"] == 8 + 16
    assert [dataclasses.replace(_TINY, inputs=n).input_components(7) for n in range(5)] == [0, 12, 24, 36, 42]


def test_forward_pass_of_public_models():
    by_name = {shape.name: shape for shape in PUBLIC}
    # All weights that their makers count, less embeddings and the output head.
    assert by_name["Llama-3.1-8B"].active_weights == pytest.approx(8.03e9 - 2 * 128256 * 4096, rel=0.001)
    assert by_name["Llama-3.1-70B, TP 4"].active_weights == pytest.approx((70.55e9 - 2 * 128256 * 8192) / 4, rel=0.001)
    assert by_name["Qwen2.5-7B"].active_weights == pytest.approx(6.53e9, rel=0.005)
    assert by_name["SmolLM2-135M"].active_weights == pytest.approx(134.5e6 - 49152 * 576, rel=0.001)
    assert by_name["DeepSeek-V3"].active_weights == pytest.approx(36.6e9 - 129280 * 7168, rel=0.001)
    assert by_name["DeepSeek-V3"].all_weights == pytest.approx(671e9 - 2 * 129280 * 7168, rel=0.002)
    assert _TINY.forward_flops(10) == 200 + 2 * 12 * 10
    # 4 x context x heads x dimension x layers.
    assert by_name["Llama-3.1-8B"].forward_flops(1000) - by_name["Llama-3.1-8B"].forward_flops(0) == 4e3 * 32 * 128 * 32


def test_break_even_is_where_both_take_as_long():
    assert costs.break_even(100, 1, 6) == 20
    assert costs.break_even(100, 6, 6) is None
    assert costs.recompute_flops(_TINY, 10) == 10 * (200 + 2 * 12 * 5)
    assert costs.stored_bytes(_TINY, 10, "raw") == 10 * 48 * 2


def test_a_device_is_as_slow_as_the_slower_side():
    device = costs.Device("toy", 0, 100, 10, 10, 5, 1000, reached=0.5)
    assert device.seconds(100, device.int8_ops, 10) == 4 and device.side(100, device.int8_ops, 10) == "bytes"
    assert device.seconds(100, device.float32_flops, 10) == 20
    assert device.side(100, device.float32_flops, 10) == "operations"
    assert costs.device_decode_seconds(device, _TINY, Shares(1, 1, 1), 16, "raw") == 0


def test_a_larger_batch_shares_what_is_read_of_the_profile():
    few, many = (costs.device_steps(_TINY, Shares(1, 0, 1), tokens, 8)["decode"][0] for tokens in (1, 1000))
    weights = model_shapes.operations(_TINY, Shares(1, 0, 1))["predict_macs"] / _TINY.components
    assert few.operations == many.operations == 2 * weights
    assert few.byte_count - many.byte_count == pytest.approx(weights * 0.999)


def test_fit_finds_costs_and_has_none_below_zero():
    columns = np.array([[1.0, 2.0], [2.0, 1.0], [3.0, 5.0]])
    assert cpu_costs.not_negative_fit(columns, columns @ [0.5, 2.0]) == pytest.approx([0.5, 2.0])
    found = cpu_costs.not_negative_fit(columns, columns @ [1.0, -0.1])
    assert found[0] > 0 and found[1] == 0


def test_predictions_are_operations_times_costs():
    row = {"operations": {**model_shapes.operations(_TINY, Shares(1, 0.5, 1))}, "batch_tokens": 16, "kv_heads": 2,
           "k_head_dim": 3}
    of_step = {step: {"components": 1.0} for step in (*cpu_costs.DECODE, *cpu_costs.ENCODE)}
    of_all = {**of_step, "decode_rest": {"components": 2.0}, "encode_rest": {"components": 0.0}, "decode_exact": {}}
    assert cpu_costs.predict(of_all, "decode", row) == (len(cpu_costs.DECODE) + 2) * 48
    assert cpu_costs.predict(of_all, "encode", row) == len(cpu_costs.ENCODE) * 48


def test_what_was_counted_is_what_the_formulas_say(measured):
    """Of the bench's runs: all that does not follow from the KV itself."""
    shapes = {shape.name: shape for shape in (*PUBLIC, *costs.OTHERS, *(shape for shape, _ in costs.FITTED))}
    assert {row["name"] for row in measured.rows} == {*shapes, costs.REAL_NAME}
    for row in measured.rows:
        counted, shape = row["operations"], shapes.get(row["name"], PUBLIC[0])
        shares = Shares(*(counted[one] / counted[other] for one, other in (
            ("coded_values", "components"), ("nonzero_values", "components"), ("entropy_steps", "coded_values"))))
        for kind, amount in model_shapes.operations(shape, shares).items():
            # How many values are not zero differs from plane to plane, but planes are of one size.
            assert counted.get(kind, 0) == pytest.approx(amount), f"{row['name']}: {kind}"


def test_the_bench_counts_the_same_today(measured):
    """One small shape; where the bench is built."""
    if not costs.BENCH.is_file():
        pytest.skip("build/release/tests/bench/codec_costs_bench is not built")
    shape = dataclasses.replace(costs.FITTED[0][0], layers=3)
    output = subprocess.run([costs.BENCH, *costs.bench_arguments(shape, Shares(0.9, 0.1, 1)), "--rounds", "1"],
                            check=True, capture_output=True, text=True).stdout
    row = json.loads(output)
    of = model_shapes.operations(shape, Shares(0.9, 0.1, 1))
    for kind in ("components", "predict_macs", "analyze_macs", "importance_macs", "importance_features"):
        assert row["operations"][kind] == pytest.approx(of[kind])
    assert row["operations"]["nonzero_values"] == pytest.approx(of["nonzero_values"], rel=0.3)
    assert row.keys() >= {"seconds", "encode_steps", "decode_steps", "alone"} and measured.rows[0].keys() >= row.keys()


def test_decode_and_encode_are_predicted_within_a_quarter(measured):
    """Of the committed measurement, of shapes that nothing was fitted to."""
    for counted in (True, False):
        for direction, error in costs.worst_errors(measured, is_fit=False, counted=counted).items():
            assert abs(error) < 0.25, direction


def test_the_tables_of_the_page_are_those_of_the_program(measured):
    page = costs.DOCUMENT.read_text(encoding="utf-8")
    assert costs.with_tables(page, costs.tables(measured)) == page


def test_the_page_has_a_place_for_each_table():
    with pytest.raises(ValueError):
        costs.with_tables("no marks", {"check": "| |\n"})
    marked = "a\n<!-- costs.py: x -->\nold\n<!-- end -->\nb"
    assert costs.with_tables(marked, {"x": "| new |\n"}) == "a\n<!-- costs.py: x -->\n| new |\n<!-- end -->\nb"


def test_pictures_and_json_are_written(measured, tmp_path):
    costs.draw(measured, tmp_path / "costs.png")
    assert (tmp_path / "costs.png").read_bytes().startswith(b"\x89PNG")
    rows = json.loads(json.dumps(costs.break_evens(measured)))
    assert len(rows) == len(PUBLIC) * len(costs.CONTEXTS) * len(costs.STORED_BITS)
