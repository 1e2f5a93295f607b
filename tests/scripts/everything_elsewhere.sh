#!/usr/bin/env bash
# The whole suite on a machine with many cores, in rows that run at once: one log for each in $1.
out=$1
export PYTHONPATH=$PWD/src OMP_NUM_THREADS=1
py="python3 -m pytest -p no:cacheprovider"
rest="--ignore=tests/runtime --ignore=tests/job --ignore=tests/capture --ignore=tests/plan --ignore=tests/directives"
$py -m 'not processes and not soak' tests/runtime > "$out/runtime.log" 2>&1 &
$py -m 'not processes and not soak' tests/job > "$out/job.log" 2>&1 &
$py -m 'not processes and not soak' tests/capture > "$out/capture.log" 2>&1 &
$py -m 'not processes and not soak' tests/plan tests/directives > "$out/plan.log" 2>&1 &
$py -m 'not processes and not soak' $rest > "$out/rest.log" 2>&1 &
$py -m 'processes and not soak' > "$out/processes.log" 2>&1 &
wait
for log in "$out"/*.log; do echo "$log: $(tail -n 1 "$log")"; grep -E "^(FAILED|ERROR)" "$log"; done
