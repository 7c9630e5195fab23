"""A calibration from beginning to end."""

import argparse
import dataclasses
import datetime
import hashlib
import json
import sys
import time
from collections.abc import Sequence

import numpy as np
from tqdm import tqdm

from kvtrie.calibrate import (figures, metrics, model_spec, options as command_line, repeated, report, steps, texts,
                              torch_model)
from kvtrie.calibrate.commands import Kvtrie
from kvtrie.calibrate.measure import Measurement
from kvtrie.calibrate.work_folder import WorkFolder
from kvtrie.errors import KvtrieError

_SEED = 1
_SHARE_OF_ALONE_MAX = 0.9  # of bits: what saves less is not worth the references
_PROFILE_BYTES_MAX = 256 << 20  # as storage/codec/profile_header.h has it
_FLAGS_OF_DIFFERENCES = ("heads", "no-metric", "ridge", "shrinkage")  # among those of a fit


@dataclasses.dataclass(frozen=True)
class _Fit:
    """A draft and what was measured of it."""

    key: str
    steps: dict[str, float]
    body_digest: str
    rows: list[figures.Figures]
    difference_steps: float | None = None  # None: it codes no text against another

    def trial(self, level: str) -> steps.Trial:
        return steps.Trial(self.steps[level], figures.worst(self.rows)[level].mean_kl)

    def all_are(self, judge, margin: float) -> bool:
        return all(judge(level, self.trial(level), margin) for level in self.steps)


def calibrate(options: argparse.Namespace) -> int:
    """Runs a calibration as the command line says; gives the exit code. Errors: KvtrieError."""
    return _Calibration(options).run()


class _Calibration:
    def __init__(self, options: argparse.Namespace):
        self._options = options
        self._start = time.monotonic()
        self._kvtrie = Kvtrie(options.kvtrie)
        if options.threads:
            torch_model.torch.set_num_threads(options.threads)
        config = model_spec.read_config(options.model_dir)
        self._geometry = model_spec.geometry_from_config(config, options.kv_dtype)
        self._prefix_tokens = self._choose_prefix()
        self._split, self._fitted_again, self._held_out_again = self._split_texts()
        weights_digest = model_spec.file_digest(model_spec.weight_files(options.model_dir)).hex()
        self._spec = self._make_spec(weights_digest)
        self._gradients = not options.no_gradients and options.material is None
        self._work = WorkFolder(options.work, {
            "weights": weights_digest,
            "spec": self._spec,
            "first_token": options.first_token,
            "prefix_tokens": self._prefix_tokens,
            "continuation_tokens": options.continuation_tokens,
            "draws": options.draws if self._gradients else 0,
            "dtype": options.dtype,
        })
        self._work.write(self._work.spec, json.dumps(self._spec, indent=1).encode())
        self._model = torch_model.Model(options.model_dir, self._geometry, options.dtype, options.device)
        self._measurement = Measurement(self._kvtrie, self._work, self._model, self._prefix_tokens, self._bar)

    def run(self) -> int:
        self._say(f"{len(self._split.fitted)} samples to fit, {len(self._split.held_out)} held out, of "
                  f"{self._prefix_tokens} tokens and {self._options.continuation_tokens} behind them")
        for path in self._split.too_short:
            self._say(f"{path}: too short for a sample, left out")
        self._compute_samples()
        material = self._make_material()
        self._vocabulary = self._make_vocabulary()
        fits = self._find_steps(material)
        chosen = [fit for fit in fits if fit.all_are(steps.holds, self._options.margin)]
        if not chosen:
            print(report.figures_table(fits[-1].rows, fits[-1].steps))
            broken = [level for level in fits[-1].steps
                      if not steps.holds(level, fits[-1].trial(level), self._options.margin)]
            raise KvtrieError(f"no profile: after {len(fits)} fits, {', '.join(broken)} does not keep its promise "
                              "with a margin on every group; raise --fits-max, or leave the level out with a step "
                              "of 0")
        # The profile that makes KV smallest, all levels counting alike.
        best = min(chosen, key=lambda fit: sum(np.log(row.bits_per_component)
                                               for row in figures.worst(fit.rows).values()))
        if best is not fits[-1]:
            print(f"\nThe smallest of {len(chosen)} that keep their promises:")
            print(report.figures_table(best.rows, best.steps))
        self._finish(self._with_differences(best, material))
        return 0

    def _choose_prefix(self) -> int:
        options = self._options
        prefix = options.sample_tokens - options.continuation_tokens
        most = self._geometry.sample_tokens_max // options.block_tokens * options.block_tokens
        if most == 0:
            raise KvtrieError(f"--block-tokens {options.block_tokens}: KV of so many tokens of this model takes more "
                              "than 64 MiB, the most that a block may have")
        if prefix > most:
            self._say(f"samples have {most} tokens and a continuation: raw KV of {prefix} takes more than 64 MiB")
        return min(prefix, most)

    def _split_texts(self) -> tuple[texts.Split, list[repeated.Session], list[repeated.Session]]:
        """And sessions that hold text of fitted and of held-out samples again, to fit and to judge differences."""
        options = self._options
        tokenizer = torch_model.load_tokenizer(options.model_dir)
        first = command_line.first_token(options.first_token, tokenizer.bos_token_id)
        cut = texts.Cut(self._prefix_tokens + options.continuation_tokens, options.samples_per_text,
                        options.fitted_samples_max, options.held_out_share, options.held_out_max)
        split = texts.split(options.text, texts.parse_groups(options.held_out_group),
                            lambda text: tokenizer(text, add_special_tokens=False, verbose=False).input_ids, first, cut)
        if options.repeated_samples == 0:
            return split, [], []
        lead = 0 if first is None else 1
        fitted = repeated.repeat(split.fitted[:options.repeated_samples], split.fitted, self._prefix_tokens, lead)
        # A prefix is not judged: where no other text is held out, one of the fitted ones will do.
        others = split.held_out if len({sample.text for sample in split.held_out}) > 1 else split.fitted
        held_out = repeated.repeat(split.held_out, others, self._prefix_tokens, lead)
        shared = repeated.shared_tokens(fitted, self._prefix_tokens)
        if shared < repeated.SHARED_TOKENS_MIN or not held_out:
            self._say(f"the profile will code no text against another: fitted samples give {shared} tokens behind "
                      f"another prefix, must be {repeated.SHARED_TOKENS_MIN}; give more or longer texts, or raise "
                      "--repeated-samples")
            return split, [], []
        return split, fitted, held_out

    def _make_spec(self, weights_digest: str) -> dict:
        options = self._options
        tokenizer_digest = model_spec.file_digest(model_spec.tokenizer_files(options.model_dir))
        made = model_spec.spec_json(self._geometry, options.name or options.model_dir.resolve().name,
                                    options.weights_revision or weights_digest, tokenizer_digest,
                                    options.block_tokens)
        if options.spec is None:
            return made
        try:
            spec = json.loads(options.spec.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise KvtrieError(f"--spec {options.spec}: cannot be read: {error}") from error
        if not isinstance(spec, dict):
            raise KvtrieError(f"--spec {options.spec}: is no JSON object")
        model_spec.check_same_model(spec, made)
        return spec

    def _compute_samples(self) -> None:
        names = {sample.name for sample in self._split.fitted}
        for path in self._work.fitted.iterdir():  # of a run over other texts
            if path.stem not in names:
                path.unlink()
        for sample in self._bar(self._split.fitted, "KV and gradients" if self._gradients else "KV"):
            path = self._work.fitted / sample.name
            if self._work.has_sample(path) and self._work.sums(sample.name).exists():
                continue
            computed = self._model.compute(sample.token_ids, self._prefix_tokens,
                                           self._options.draws if self._gradients else 0, _SEED)
            self._work.write_arrays(self._work.sums(sample.name), **computed.sums)
            self._work.write_sample(path, sample.token_ids[:self._prefix_tokens], computed.kv, computed.importance)
        for sample in self._bar([*self._split.held_out, *self._held_out_again], "KV of held-out texts"):
            self._prefill(self._work.held_out(sample.name), sample.token_ids)

    def _prefill(self, path, token_ids: tuple[int, ...]) -> None:
        if not self._work.has_sample(path):
            prefix = token_ids[:self._prefix_tokens]
            self._work.write_sample(path, prefix, self._model.prefill(prefix))

    def _make_material(self):
        """The path of what is known of the model beside its KV."""
        if self._options.material:
            return self._options.material
        sums = [self._work.sums(sample.name) for sample in self._split.fitted]
        metrics_path, queries_path, material = (self._work.path / name for name in
                                                ("metrics.f32", "queries.f32", "material.bin"))
        if self._gradients:
            metric = metrics.from_gradients(map(np.load, sums))
            self._work.write(queries_path, metrics.query_statistics(map(np.load, sums)).tobytes())
        else:
            metric = metrics.without_gradients(map(np.load, sums), self._model.output_weights(),
                                               self._geometry.kv_heads, self._model.rope_frequencies())
        self._work.write(metrics_path, metric.tobytes())
        self._kvtrie.profile("material", flags={
            "spec": self._work.spec, "samples": self._work.fitted, "metrics": metrics_path,
            "queries": queries_path if self._gradients else None, "out": material})
        return material

    def _make_vocabulary(self):
        """The path of what layer 0 makes of tokens; None: nothing is known of it."""
        count = min(self._options.vocabulary_max, self._model.vocabulary_tokens)
        path = self._work.vocabulary(count)
        if count > 0 and not path.exists():
            self._say(f"layer 0 of {count} tokens")
            rows = self._model.first_layer(range(count))
            if rows is None:
                return None
            self._work.write(path, np.arange(count, dtype="<u4").tobytes() + rows.astype("<f4").tobytes())
        return path if count > 0 else None

    def _find_steps(self, material) -> list[_Fit]:
        """All fits that were made: the last one is good, or there were too many."""
        chosen = {level: getattr(self._options, level.replace("-", "_")) for level in steps.FIRST_STEPS}
        chosen = {level: step for level, step in chosen.items() if step > 0}
        margin = self._options.margin
        fits: list[_Fit] = []
        while len(fits) < self._options.fits_max:
            fits.append(self._fit_and_measure(material, chosen, len(fits) + 1))
            print(report.figures_table(fits[-1].rows, fits[-1].steps), flush=True)
            if fits[-1].all_are(steps.is_good, margin):
                break
            chosen = {level: step if steps.is_good(level, fits[-1].trial(level), margin) else
                      steps.next_step(level, [fit.trial(level) for fit in fits], margin)
                      for level, step in chosen.items()}
            if chosen == fits[-1].steps:
                break
        return fits

    def _fit_and_measure(self, material, chosen: dict[str, float], number: int) -> _Fit:
        flags = {level: f"{chosen.get(level, 0):.9g}" for level in steps.FIRST_STEPS}
        flags |= command_line.fit_flags(self._options.fit_flag)
        decides = (self._kvtrie.digest(), material.read_bytes(), sorted(flags.items()), self._options.block_tokens,
                   self._vocabulary and self._vocabulary.name,
                   sorted(sample.name for sample in self._split.fitted))
        key = hashlib.sha256(repr(decides).encode()).hexdigest()[:16]
        draft, about = self._work.fit(key, "draft"), self._work.fit(key, "json")
        if not draft.exists() or not about.exists():
            self._say(f"fit {number}: steps " + ", ".join(f"{level} {step:.3g}" for level, step in chosen.items()))
            answer = self._kvtrie.profile("fit", flags={"spec": self._work.spec, "samples": self._work.fitted,
                                                        "material": material, "vocabulary": self._vocabulary,
                                                        **flags, "out": draft})
            self._work.write(about, json.dumps(answer).encode())
        body_digest = json.loads(about.read_text())["body_digest"]
        outcomes = self._measurement.alone(key, list(chosen), self._split.held_out, f"measuring fit {number}")
        return _Fit(key, chosen, body_digest, figures.of_groups(outcomes))

    def _with_differences(self, fit: _Fit, material) -> _Fit:
        """The same fit, and how it codes text against the same text elsewhere; as it is where that breaks a promise."""
        pairs = {level: finer for level in fit.steps if (finer := steps.reference_level(level, fit.steps))}
        if not pairs or not self._fitted_again:
            return fit
        names = {session.name for session in self._fitted_again}
        for path in self._work.repeated.iterdir():  # of a run over other texts
            if path.stem not in names:
                path.unlink()
        for session in self._bar(self._fitted_again, "KV behind other prefixes"):
            self._prefill(self._work.repeated / session.name, session.token_ids)
        best: _Fit | None = None
        broken: list[str] = []
        trials: list[tuple[float, bool]] = []
        factor: float | None = self._options.difference_steps
        while factor is not None:
            found = self._fit_differences(fit, material, pairs, factor)
            if found is None:
                return fit
            again = figures.worst_against(found.rows)
            print(f"\nAgainst the same text behind another prefix, steps {factor:.3g} times the level's:")
            print(report.figures_table([row for row in found.rows if row.against], found.steps), flush=True)
            now_broken = [level for level in pairs if not steps.holds(
                level, steps.Trial(found.steps[level], again[level].mean_kl), self._options.margin)]
            broken = now_broken or broken
            best = best if now_broken else found  # a later one that holds has larger steps
            trials.append((factor, not now_broken))
            factor = steps.next_factor(trials)
        if best is None:
            print(f"{', '.join(broken)} does not keep its promise with a margin against the same text elsewhere: the "
                  "profile codes every text alone. Smaller steps of that level, or a smaller --difference-steps, may "
                  "do.", flush=True)
            return fit
        print(f"Taken are steps {best.difference_steps:.3g} times the level's.", flush=True)
        if min(row.of_alone for row in figures.worst_against(best.rows).values()) > _SHARE_OF_ALONE_MAX:
            print("Even so texts take hardly less than alone: the profile codes every text alone.", flush=True)
            return fit
        return best

    def _fit_differences(self, fit: _Fit, material, pairs: dict[str, str], difference_steps: float) -> _Fit | None:
        """None: the profile would be too large."""
        decides = (fit.key, sorted(session.name for session in self._fitted_again), difference_steps)
        key = hashlib.sha256(repr(decides).encode()).hexdigest()[:16]
        draft, about = self._work.fit(key, "draft"), self._work.fit(key, "json")
        if not draft.exists() or not about.exists():
            self._say(f"fit of differences: steps {difference_steps:.3g} times the level's")
            kept = {name: value for name, value in command_line.fit_flags(self._options.fit_flag).items()
                    if name in _FLAGS_OF_DIFFERENCES}
            answer = self._kvtrie.profile("fit", flags={
                "spec": self._work.spec, "samples": self._work.fitted, "repeated": self._work.repeated,
                "material": material, "base": self._work.fit(fit.key, "draft"),
                "difference-steps": f"{difference_steps:.9g}", **kept, "out": draft})
            self._work.write(about, json.dumps(answer).encode())
        if (size := draft.stat().st_size) > _PROFILE_BYTES_MAX:
            print(f"With what a text differs by from the same text elsewhere the profile has {size / 2**20:.0f} MiB, "
                  f"must have at most {_PROFILE_BYTES_MAX >> 20}: it codes every text alone. With --fit-flag heads it "
                  "is smaller.", flush=True)
            return None
        body_digest = json.loads(about.read_text())["body_digest"]
        again = self._measurement.again(key, pairs, self._held_out_again, "measuring behind other prefixes")
        return dataclasses.replace(fit, key=key, body_digest=body_digest, difference_steps=difference_steps,
                                   rows=[*fit.rows, *figures.of_groups(again)])

    def _finish(self, fit: _Fit) -> None:
        options = self._options
        about = {
            "model": self._spec["name"],
            "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "fitted_samples": len(self._split.fitted),
            "prefix_tokens": self._prefix_tokens,
            "continuation_tokens": options.continuation_tokens,
            "block_tokens": options.block_tokens,
            "steps": fit.steps,
            "gradients": self._gradients,
            "repeated_samples": len(self._fitted_again),
            "difference_steps": fit.difference_steps,
        }
        measured = self._work.fit(fit.key, "measured.json")
        figures_json = figures.measured_json(fit.body_digest, fit.rows, about)
        self._work.write(measured, json.dumps(figures_json, indent=1).encode())
        self._kvtrie.profile("seal", self._work.fit(fit.key, "draft"), flags={"measured": measured, "out": options.out})
        print(f"{options.out}: {options.out.stat().st_size / 2**20:.1f} MiB, after "
              f"{time.monotonic() - self._start:.0f} s", flush=True)
        if options.json:
            self._work.write(options.json, measured.read_bytes())
        if options.png:
            report.draw(fit.rows, options.png, self._spec["name"])
        if options.put:
            print(f"stored with {options.put} as {self._kvtrie.put(options.out, options.put)}")

    @staticmethod
    def _bar(samples: Sequence, what: str):
        return tqdm(samples, desc=what, unit="text", file=sys.stderr, mininterval=1)

    @staticmethod
    def _say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)
