"""The words of the commands in shell scripts: those that bash itself passes, and the reason of each part that is not
known."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from megalite.config.errors import ConfigError
from megalite.importers.shell.script import ScriptResult, commands

PROGRAMS = ("python", "torchrun")
STUBS = {
    **dict.fromkeys(PROGRAMS, 'printf "%s\\0" "${0##*/}" "$@" "" >> "$RECORD"'),
    "srun": 'while [[ $1 == -* ]]; do shift; done; exec "$@"',
    "sbatch": 'case "$1" in --wrap=*) exec bash -c "${1#*=}";; -*|"") exec bash;; *) exec bash "$@";; esac',
    "bc": "exec awk '{ gsub(/\\^/, \"**\"); print $1 $2 $3 }' | { read -r e; echo $((e)); }",
}
SCRIPTS = {
    "a command in a variable": 'LAUNCH="torchrun --nnodes 2"\nCMD="x.py --a 1"\nsrun -n1 bash -c "$LAUNCH $CMD --b 2"',
    "a string of quoted words": """srun sh -c 'python x.py --a "b c" --d "e"'""",
    "export reaches a child": "export A=1\nbash -c 'python x.py --a $A'",
    "defaults that assign": ': "${LAYERS:=36}" ${HIDDEN:=64}\npython x.py --l $LAYERS --h "$HIDDEN" --w ${W:-8} --v '
    '"${V-a b}"',
    "alternatives": 'D=1\npython x.py ${D:+--d "$D"} ${E:+--e} ${D+--f} "${D:+"a b"}" ${E:-"c d" e}',
    "a branch that is taken": (
        'D=bf16\nif [ "$D" = fp16 ]; then P=--fp16; elif [[ $D == bf* ]]; then P=--bf16; else P=; fi\npython x.py --a '
        "$P"
    ),
    "a case": 'S=7B\ncase "$S" in\n  1B|3B) L=2 ;;\n  7*) L=4; H=8 ;;\n  *) L=0 ;;\nesac\npython x.py --l $L --h $H',
    "nested quotes": 'N=$(echo "$(echo "a b" | tr " " "_")")\npython x.py --n "$N" --m "$(echo "x (y)")"',
    "arrays": 'A=(--x 1 "b c" # a comment\n  # another\n  [0]*2)\nA+=(--y)\npython x.py "${A[@]}" ${A[2]} --n ${#A[@]} '
    '"${A[@]:0:2}"',
    "an array unquoted": 'A=("--x 1" --y)\npython x.py ${A[@]}',
    "an associative array": 'declare -A L=([7B]=32 [13B]="40")\nS=13B\npython x.py --l ${L[$S]} --k ${L[7B]}',
    "arithmetic": (
        "N=4; G=8\nlet M=N+1\n((M += 2))\npython x.py --w $((N*$G)) --m $M --q $((N > 2 ? 7 / 2 : 0)) --r $(( -7 / 2 "
        ")) --p $((2**5 % 7))"
    ),
    "programs": (
        "N=6\n"
        "python x.py --a $(expr $N \\* 2) --s $(seq -s, 1 3) --b $(basename /a/b.txt .txt) --d `dirname a/b/c` --p "
        "$(printf '%s-%d' a 3)"
    ),
    "edited values": "V=model-7B.tar.gz\npython x.py ${V%%.*} ${V#*-} ${V%.gz} ${V/7B/8B} ${V^^} ${V:0:5} ${V//-/_} "
    '"${V##*.}"',
    "loops": 'D=""\nfor i in 1 2 {3..4}; do D="$D 0.$i part_$i"; done\nfor ((j=0; j<2; j++)); do D+=" $j"; '
    "done\npython x.py --data $D",
    "a while loop": "i=0; W=\nwhile [ $i -lt 3 ]; do W=$W$i; i=$((i+1)); done\npython x.py --w $W",
    "functions": 'train() { local n=$1; shift; python x.py --n "$n" "$@"; }\nn=9\ntrain 3 --b "c d"\npython x.py --n $n',
    "a function's output": "args() { echo --a 1 --b $1; }\npython x.py $(args 2)",
    "return": "f() { if [ $1 = a ]; then python x.py --one; return; fi; python x.py --two; }\nf a; f b",
    "a here document": "read -r -d '' CMD <<EOF\npython x.py --a ${A:-1} \\\n  --b 'c d'\nEOF\nsrun bash -c \"$CMD\"",
    "a here document that is quoted": "sbatch <<'EOF'\nX=1\npython x.py --a $X\nEOF",
    "a here document into a shell": "X=2\ncat <<EOF | bash\nY=3\npython x.py --a $X --b \\$Y --c $(echo 4)\nEOF",
    "a here string": 'bash <<< "python x.py --a 1"',
    "a script that is written": "cat > job.sh <<'EOF'\npython x.py --a $1 --n $#\nEOF\nbash job.sh 5 6\nsource job.sh 7",
    "a script that is submitted": "printf 'python x.py --a 1\\n' > job.sh\nsbatch job.sh",
    "a wrapped command": 'A=1\nsbatch --wrap="python x.py --a $A"',
    "a here document that begins with a variable": "L=python\nread -r -d '' CMD <<EOF\n  $L x.py --a \\$B "
    "'c'\nEOF\nB=1\neval \"$CMD\"",
    "arithmetic of braces": "T=6000000000; G=4\npython x.py --a $(( ${T} * 3 / ${G} )) --b $(( ($T > 1) ? 1 : 0 ))",
    "a command that is shown first": 'CMD="python x.py --a 1"\necho $CMD\necho "$CMD" | tee log\n$CMD',
    "eval": 'X=\'--b "c d"\'\nCMD="python x.py --a 1 $X"\neval $CMD\n$CMD',
    "exec": "exec python x.py --a 1",
    "what follows exit": "python x.py --a 1\nexit 0\npython x.py --b 2",
    "a comment ends a command": "python x.py --a 1 \\\n  # --b 2 \\\n  --c 3",
    "redirections": (
        "python x.py --a 1 > log --b 2 2>&1\npython x.py --c 3 &> log < /dev/null &\nwait\npython x.py --d '1 > 2; 3' "
        "2>&1 | tee log"
    ),
    "lists": (
        'A=1;B=2; cd . && export C=3 && python x.py --a $A$B$C || python x.py --no\n[ -n "$A" ] && D=4\n'
        '[ -z "$A" ] && D=5\npython x.py --d $D'
    ),
    "environment of one command": "A=1\nA=2 bash -c 'python x.py --a $A'\nenv A=3 bash -c 'python x.py --a $A'\npython "
    "x.py --a $A",
    "a subshell": "A=1\n(A=2; python x.py --a $A)\npython x.py --a $A",
    "positional parameters": 'set -- a "b c"\npython x.py "$@" $# "$2" $*\nshift\npython x.py "$1"',
    "quotes": """A='x"y'\npython x.py "$A" $'a\\tb' a\\ b "c\\"d\\$e" ''"" --l '([0]*3+[1]*58)' [a]""",
    "spaces between expansions": 'A=1; B=2\npython x.py "$A $B  $A" $A$B "${A} ${B}"',
    "joined by IFS": 'A=(a b c)\nJ=$(IFS=,; echo "${A[*]}")\npython x.py --j $J\nIFS=: read -r P Q <<< "x:y"\npython '
    "x.py $P $Q",
    "brace lists": "python x.py {a,b}-1 p{1..3} {1..7..3} {9..0..-5} {08..10} {c..a}",
    "indirection": "NAME=SIZE; SIZE=5\npython x.py ${!NAME} ${#NAME}",
    "line ends of Windows in no word": "A=1\npython x.py --a $A \\\n  --b 2",
    "numbers and operators": (
        "A=(4 5); N=8\npython x.py $((010 + 16#ff)) $((A[1] * 2)) $((N > 16 ? 4 : N > 4 ? 2 : 1)) $((a = 3, (a + 1) * "
        "2)) $((-2 ** 2))\n"
        "declare -i M=2*3\nM+=4\npython x.py $M $((1 || (N = 3))) $N"
    ),
    "anchored replacements": "P=/a/b/a; A=(1 2)\npython x.py ${P/#\\/a/X} ${P/%a/Z} ${P/#b/Q} ${P//\\//_} "
    '"${A[@]/#/--p}" "${A[@]/%/s}"',
    "patterns": (
        "shopt -s extglob\nM=llama3.5; G='a*b'\n"
        'case $M in @(llama|qwen)*([0-9.])) L=1;; *) L=2;; esac\n[[ axb == "$G" ]] || Q=1\n[[ axb == $G && $M == [^q]* '
        "]] && R=1\n"
        "[[ $M =~ ^([a-z]+)([0-9]+)\\.([[:digit:]])$ ]] && V=${BASH_REMATCH[2]}-${BASH_REMATCH[3]}\npython x.py $L $Q "
        "$R $V ${G%\\**}"
    ),
    "parts of the parameters": (
        'f() { python x.py "${@:2}" , "${@:1:1}" , "${@: -1}" "$@"; }\nf a b "c d"\nbash -c \'python x.py $0 '
        '"${@:1}"\' z y\n'
        'A=()\ng() { python x.py "${@:2}" , "$@" "${A[@]}" "$A"; }\ng'
    ),
    "set without dashes": "set -e 3 5\npython x.py $1 $#\nset -euo pipefail -- 7\npython x.py $1\nset --\npython x.py "
    'a "$@"',
    "references": 'add() { local -n out=$1; out+=(--$2 "$3"); }\nA=(--x)\nadd A tp "4 5"\npython x.py "${A[@]}"',
    "unset": 'A=1; B=(1 2 3); declare -A D=([x]=1 [y]=2)\nunset A B[0] "D[x]"\npython x.py "${A-no}" ${A+yes} '
    '"${B[@]}" "${D[@]}"',
    "the keys of an array": 'declare -A M=([tp]=4)\nN=(x y)\npython x.py "${!M[@]}" ${!N[@]} ${M[tp]}',
    "loops over lines": (
        "while IFS='=' read -r k v; do A+=(--$k \"$v\"); done <<EOF\ntp=4\nd=e=f g\nEOF\n"
        'while read -r x; do [ -z "$x" ] && continue; A+=($x); done <<< "1\n\n2"\nseq 2 | while read i; do python x.py '
        "--i $i; done\n"
        'mapfile -t B < <(seq 2)\nIFS=, read -ra C <<< a,b,,d\npython x.py "${A[@]}" "${B[@]}" "${C[@]}"'
    ),
    "files of arguments": (
        'echo "--a 1" > args.txt\necho "--b 2" >> args.txt\npython x.py $(< args.txt) $(cat args.txt)\n'
        "xargs python x.py --z < args.txt\nmapfile -t A < args.txt\npython x.py ${A[@]}"
    ),
    "getopts": (
        'f() { while getopts ":vt:p:" o; do case $o in v) V=1;; t) T=$OPTARG;; p) P=$OPTARG;; \\?) U=1;; esac; done\n'
        "shift $((OPTIND-1)); R=$*; }\n"
        "f -vt4 -p 2 -x rest more\npython x.py $V $T $P $U $R"
    ),
    "a function around its program": 'torchrun() { command torchrun --n 2 "$@"; }\ntorchrun x.py --a 1',
    "what follows exec": "(exec python x.py --a 1)\nexec 3>&1\nexec python x.py --b 1\npython x.py --c 1",
    "variables of a function": "f() { declare T=4; declare -g G=5; }\nf\npython x.py ${T:-none} $G",
    "cases that go on": "N=1; M=1\ncase a in a) ;;& *) N=2;; esac\ncase a in a) ;& b) M=2;; esac\npython x.py $N $M",
    "loops that are left": (
        "for i in 1 2; do for j in 1 2; do [ $j = 2 ] && continue 2; X+=$i$j; done; X+=z; done\n"
        "for i in 1 2; do for j in 1 2; do [ $j = 2 ] && break 2; Y+=$i$j; done; done\nA=(1 2); A[1]+=x\npython x.py "
        "$X $Y ${A[@]} $?"
    ),
    "the status of $(…)": (
        "A=$(false) || A=2\nB=1 C=`exit 3` D=4 || B=2\nE=$(echo 3; false) || E=5\nF=$(echo 6) || F=7\n"
        "if G=$(false); then H=1; else H=2; fi\nI=($(false)) || I=(8)\nf() { J=$(false) || return 1; J=no; }\nf || K=9\n"
        'export L=$(false) || L=10\npython x.py $A $B $E $F $H "${I[@]}" "[$J]" $K "[$L]"'
    ),
    "arrays with holes": (
        'A=(1 2 3 4)\nunset A[1]\nA+=(5)\npython x.py "${A[@]}" ${#A[@]} ${!A[@]} "[${A[1]}]" ${A[2]} ${A[1]-no} ${A[-1]} '
        '"${A[@]:1:2}" $((A[1] + A[2]))\nB[3]=x\nB[-1]+=y\nI=2\nC=(a [I+1]=b c)\nC+=([1]=d)\n'
        'python x.py "${B[@]}" ${#B[@]} "${C[@]}" ${!C[@]}\n'
        'unset "C[$I+1]" B[@] A[0]\npython x.py "${C[@]}" ${#B[@]} "[$A]"'
    ),
    "local variables": "A=7; C=1; X=outer; declare -A M=([k]=v)\n"
    'f() { local A=1; local A; python x.py "${A-none}"; local A+=2; unset A; local A; python x.py "${A-none}"; A=3; }\n'
    "g() { declare A; python x.py ${A-none}; typeset C=4; h; declare C+=5; python x.py $C; local M=(x y); "
    'local M; python x.py "${M[@]}"; }\n'
    'h() { python x.py $C; local C; python x.py "${C-none}"; C=9; declare -g G=2; }\n'
    'k() { local X=$X.in C+=6 "$1=5" "$1"; [ $X ] && local D=1; python x.py $X $C $F $D; }\n'
    'f; g; k F; python x.py $A $C $X ${M[k]} $G "${F-none}${D-none}"',
    "texts of arrays": 'A=(1 2); A=x\nB=y; B[2]=z\nC=c; unset C[0]\nf() { local A=4 B; echo "${A[@]}" "${B-none}"; }\n'
    'python x.py "${A[@]}" "${B[@]}" "${C-none}" $(f)',
    "a module": "torchrun --nproc_per_node 2 -m pkg.train --a 1",
}


def script_result(script: str, read: dict[str, str] | None = None) -> ScriptResult:
    return commands(script, lambda words: words[0] in PROGRAMS or words[0] == "srun", (read or {}).get, "train.sh")


def passed(directory: Path, script: str) -> list[list[str]]:
    """The words that bash passes to the programs."""
    programs = directory / "programs"
    programs.mkdir()
    for name, text in STUBS.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "RECORD": str(directory / "record")}
    (directory / "record").touch()
    subprocess.run(
        ["bash", "-c", script], cwd=directory, env=environment, capture_output=True, timeout=300, check=False
    )
    records, words = [], (directory / "record").read_bytes().decode().split("\0")
    while "" in words[:-1] or words[0]:
        starts = [place for place, word in enumerate(words) if word in PROGRAMS][:2]
        if not starts:
            break
        end = starts[1] if len(starts) > 1 else len(words) - 1
        records.append(words[starts[0] : end - 1])
        words = words[end:]
    return records


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_words_are_those_that_bash_passes(name, tmp_path):
    runs = script_result(SCRIPTS[name]).runs
    assert [
        run.words[next(place for place, word in enumerate(run.words) if word in PROGRAMS) :] for run in runs
    ] == passed(tmp_path, SCRIPTS[name])
    assert runs and not any(word.unknown for run in runs for word in run.words)


UNKNOWN = {  # a script → a word of its command, and what its reason says
    "python x.py --a $LR": ("$LR", "not set in the script"),
    "python x.py --a ${1}": ("${1}", "an argument of the script"),
    "python x.py --a $(nproc)": ("$(nproc)", "output of a command"),
    "python x.py --a $((N / 2))": ("$((N / 2))", "$N: not set in the script"),
    "python x.py --a <your path>": ("<your path>", "placeholder"),
    "if [ $N -gt 1 ]; then T=2; else T=4; fi\npython x.py --a $T": (
        "$T",
        "set in the script to 2 or 4, under a condition in line 1",
    ),
    "T=1\n[ $N ] && T=2\npython x.py --a $T": ("$T", "set in the script to 2 or 1, under a condition in line 2"),
    "T=1\ncommand -v nvcc || T=2\npython x.py --a $T": ("$T", "set in the script to 2 or 1"),
    'T=1\ncase $X in a) T=2;; "b") T=4;; esac\npython x.py --a $T': ("$T", "set in the script to 2 or 4 or 1"),
    "for t in 1 $TS; do python x.py --a $t; done": ("$t", "a loop variable over 1 $TS"),
    "A=1\nbash -c 'python x.py --a $A'": ("$A", "without export"),
    'python x.py --a "${@:2}"': ("${@:2}", "an argument of the script"),
    "python x.py --a $(< sizes.txt)": ("$(< sizes.txt)", "output of a command"),
    "false\nR=$?\npython x.py --a $R": ("$?", "exit status of a failed command"),
    "A=x\npython x.py --a ${A@Q}": ("${A@Q}", "quoted text"),
    'F=(--b)\nif [[ $D == 8 ]]; then F+=(--c 2); fi\npython x.py "${F[@]}"': ("$F", "--c 2 or nothing"),
    "read -r X < list\npython x.py --a $X": ("$X", "read from standard input"),
    'M=llama-7b; T=1\nif [[ $M =~ .*"7b" ]]; then T=2; fi\npython x.py --a $T': (
        "$T",
        "set in the script to 2 or 1, under a condition in line 2",
    ),
}


@pytest.mark.parametrize("script", UNKNOWN)
def test_what_is_not_known_is_said_with_its_reason(script):
    word, why = UNKNOWN[script]
    unknown = [part for run in script_result(script).runs for each in run.words for part in each.unknown]
    assert len(unknown) == 1 and unknown[0].source == word and why in unknown[0].why


KNOWN = {  # what decides it is not known, and yet the value is
    'if [ -z "$TP" ]; then TP=4; fi\npython x.py $TP': "4",
    '[ -n "$TP" ] || TP=4\npython x.py $TP': "4",
    "if [ $N -gt 1 ]; then A=1; T=3; else T=3; fi\npython x.py $T": "3",
    "T=3\nif [ ! -d data ]; then echo none; exit 1; fi\nmkdir -p out || { T=4; exit 1; }\npython x.py $T": "3",
    'T=3\nwhile [[ $# -gt 0 ]]; do case $1 in --t) T="$2"; shift 2;; esac; done\npython x.py $T': "3",
    "#SBATCH --nodes=4 --ntasks-per-node=8\nsrun python x.py $SLURM_NNODES": "4",
    'D=$(cd "$(dirname "$0")" && pwd)\nsource "$D/sizes.sh"\npython x.py $TP': "6",
    "source `pwd`/sizes.sh\npython x.py $TP": "6",
    "bash sizes.sh 8": "8",
    "ssh host 'cd x && python x.py --a 5'": "5",
    "docker run -v a:b image bash -lc 'python x.py --a 5'": "5",
}


@pytest.mark.parametrize("script", KNOWN)
def test_what_is_the_same_in_every_case_is_known(script):
    run = script_result(script, {"sizes.sh": "TP=6\n[ $# -gt 0 ] && python x.py $1"}).runs[-1]
    assert run.words[-1] == KNOWN[script] and not any(word.unknown for word in run.words)


def test_a_script_is_not_run(tmp_path):
    script_result(
        f"A=$(touch {tmp_path}/made)\n`touch {tmp_path}/made`\neval 'touch {tmp_path}/made'\nx.py --a $A $(touch "
        f"{tmp_path}/made)"
    )
    assert not Path(tmp_path, "made").exists()


@pytest.mark.parametrize(
    "script",
    [
        "A=xx\n" + "A=$A$A\n" * 40 + "python x.py --a $A",
        "f() { f; }\nf",
        "for ((i=0; i<1000; i++)); do for ((j=0; j<1000; j++)); do A=$i; done; done",
    ],
    ids=["text", "function", "loop"],
)
def test_a_script_without_end_is_rejected(script):
    with pytest.raises(ConfigError, match="Pass only the training command"):
        script_result(script)


def test_what_can_not_be_read_is_named_once():
    script = "source env.sh\nsource env.sh\nfor x in; do ((\npython x.py --a 1"
    unread = script_result(script).unread
    assert unread["source"] == ["env.sh"] and len(unread["line"]) == 1


def test_a_word_of_many_commas_takes_no_time():
    run = script_result("python x.py {" + "a," * 200 + " --b 1").runs[0]
    assert run.words[-2:] == ["--b", "1"]
