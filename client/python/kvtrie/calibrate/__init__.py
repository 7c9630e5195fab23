"""Makes a codec profile of a model from texts, and measures what its levels cost the model.

    python -m kvtrie.calibrate MODEL_DIR --text FILES... --out FILE.kvp

The texts are split: the codec is fitted to KV of some, and judged on others that it never saw, group by
group (file extensions, or groups that are named). Base steps are moved until each level keeps its promise
on every group, and the profile is sealed with what was measured.

model_spec   a model's identity and geometry, from its configuration
texts        files to samples of tokens, and which of them are held out
repeated     the same texts again, behind other prefixes
torch_model  KV, gradients, query statistics and next-token distributions: all that needs torch
work_folder  what is computed, kept in files, so that a run that was ended goes on
metrics      what an error costs, from gradients, or from queries and weights
commands     the command `kvtrie profile`
measure      held-out texts coded and restored, and what the model says on them
figures      what was measured of a profile
steps        the choice of base steps
report       tables and the picture
run          all of it, in order
"""
