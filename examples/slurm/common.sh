# Shared by the job scripts of this folder (docs/clusters.md). They source it from the repository folder, where they are
# submitted, because Slurm runs a copy of a script from another folder.
#
# In the environment of sbatch:
#
#   PYTHON           the interpreter (.venv/bin/python)
#   RANKS_PER_NODE   ranks per node (its GPUs); required on nodes without GPUs
#   SRUN_FLAGS       additional flags of srun, such as a container's
#   SWEEP            in an array: a file whose line N has additional flags of pretrain_vlm.py for task N
#
# Uncomment and edit what your site needs:
#
# module load cuda/12.8
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0   # the interface through which nodes reach each other
# A container of pyxis:
# SRUN_FLAGS="--container-image=/images/train.sqsh --container-mounts=$PWD,/data --container-workdir=$PWD"

refuse() {
    echo "error: $*" >&2
    exit 1
}

# ----------------------------------------------------------------------------------------- the environment of the steps

# After `sbatch --export=NAME` srun would pass on that name only.
export SLURM_EXPORT_ENV=ALL
# srun does not take this over from sbatch (since 22.05), and would bind a node's ranks to one core.
[[ -z ${SLURM_CPUS_PER_TASK:-} ]] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
# Nothing is downloaded; compute nodes mostly could not.
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}

# ------------------------------------------------------------------------------------------------------ nodes and ranks

python=${PYTHON:-.venv/bin/python}
launcher=megatron_hetero.run
read -ra srun_flags <<<"${SRUN_FLAGS:-}"
nodes=$SLURM_JOB_NUM_NODES
job=$SLURM_JOB_ID
[[ -z ${SLURM_ARRAY_JOB_ID:-} ]] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID

((${SLURM_NTASKS:-nodes} == nodes)) ||
    refuse "sbatch --ntasks, --ntasks-per-node: found $SLURM_NTASKS tasks on $nodes nodes, expected one on each," \
        "because torchrun starts a node's ranks; leave them out, and set RANKS_PER_NODE for fewer ranks than GPUs"
# The GPUs that a step has: with --exclusive this script has more, and --gpus N is spread over nodes as Slurm likes.
ranks=${RANKS_PER_NODE:-$(srun bash -c 'echo "${SLURM_GPUS_ON_NODE:-0}"' | sort -n | uniq | paste -s -d,)}
[[ $ranks != *,* ]] ||
    refuse "sbatch --gpus: found nodes of $ranks GPUs, expected as many on each of the $nodes nodes; ask for" \
        "--gpus-per-node N instead"
[[ $ranks =~ ^[1-9][0-9]*$ ]] ||
    refuse "RANKS_PER_NODE: found ${RANKS_PER_NODE:-it unset and no GPUs}, expected a number of ranks for each node;" \
        "set RANKS_PER_NODE=4, or ask for GPUs with --gpus-per-node 8"

# The nodes' addresses in the order of SLURM_NODEID, as Slurm reaches them: host names need not resolve.
declare -A address_of=()
while read -r name address; do
    address_of[$name]=$address
done < <(scontrol show node --oneliner "$SLURM_JOB_NODELIST" |
    sed -n 's/^NodeName=\([^ ]*\).* NodeAddr=\([^ ]*\).*/\1 \2/p')
addresses=()
for name in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
    addresses+=("${address_of[$name]:-$name}")
done
# Two jobs that share a head node need different ports, the tasks of an array too; so do two times of one job.
port=$((20000 + (SLURM_JOB_ID + 8191 * ${SLURM_RESTART_COUNT:-0}) % 20000))

# ------------------------------------------------------------------------------------- flags of pretrain_vlm.py in "$@"

value_of() { # FLAG WORD...: the value of a flag among the words, if it is there
    local flag=$1 word last=
    for word in "${@:2}"; do
        if [[ $word == "$flag="* ]]; then echo "${word#*=}"; elif [[ $last == "$flag" ]]; then echo "$word"; fi
        last=$word
    done
}

# In an array %a stands for the task's number, and what tasks write goes into folders of their own.
if [[ -n ${SLURM_ARRAY_TASK_ID:-} ]]; then
    for flag in --log.dir --export.hf_dir; do
        value=$(value_of "$flag" "$@")
        [[ -z $value || $value == *%a* ]] ||
            refuse "$flag: found $value, expected %a in it, the task's number, because the tasks of an array would" \
                "write into one folder; try $flag $value/%a"
    done
    if [[ -n ${SWEEP:-} ]]; then
        [[ -r $SWEEP ]] || refuse "SWEEP: found $SWEEP, which cannot be read, expected a file with a line for each task"
        read -ra flags <<<"$(awk -v task="$SLURM_ARRAY_TASK_ID" 'NR == task' "$SWEEP")"
        ((${#flags[@]})) ||
            refuse "SWEEP: found no flags in line $SLURM_ARRAY_TASK_ID of $SWEEP, expected a line for each task; try" \
                "sbatch --array 1-$(grep -c . "$SWEEP")"
        set -- "$@" "${flags[@]}"
    fi
    [[ -n $(value_of --log.dir "$@") ]] || set -- "$@" --log.dir "runs/$SLURM_ARRAY_JOB_ID/%a"
    set -- "${@//%a/$SLURM_ARRAY_TASK_ID}"
elif [[ -n ${SWEEP:-} ]]; then
    refuse "SWEEP: found $SWEEP without an array, expected both; try sbatch --array 1-N"
fi

# ------------------------------------------------------------------------------------------------------------- starting

# What is wrong with the configuration, or is not there, is reported once, before any rank starts.
check_configuration() { # FLAG...: those of pretrain_vlm.py
    # Where it runs, the interpreter may be a container's.
    local start='command -v "$0" >/dev/null || exit 127; exec "$0" "$@"' status=0
    env -u SLURM_GPUS srun --nodes=1 --ntasks=1 "${srun_flags[@]}" bash -c "$start" \
        "$python" pretrain_vlm.py "$@" --plan --plan-files --world-size $((nodes * ranks)) >/dev/null || status=$?
    ((status != 127)) ||
        refuse "PYTHON: found $python, which cannot be run, expected an interpreter; make one with \`make venv\`, or set" \
            "PYTHON to another"
    if ((status > 128)); then # A signal to all steps of the job, such as `scancel --signal`.
        warned=yes
        return
    fi
    ((status == 0)) ||
        refuse "no rank was started: the configuration is wrong, see above, for $((nodes * ranks)) ranks"
}

# One torchrun on each node, which meet at the first one: a node's number in the job is its rank, so that the first nodes
# have the first ranks. srun ends with the largest status of all nodes, and when one fails it ends the others (143), whose
# status then says nothing.
torchrun() { # FLAG...: of torchrun, pretrain_vlm.py, and its own
    local start='trap : TERM INT USR1; read -ra at <<<"$2"
        "$0" -m "$1" --local-addr "${at[SLURM_NODEID]}" --node-rank "$SLURM_NODEID" "${@:3}"
        status=$?; exit $((status == 143 ? 1 : status))'
    local meeting=()
    ((nodes == 1)) || meeting=(--master-addr "${addresses[0]}" --master-port "$port")
    exec srun --kill-on-bad-exit=1 "${srun_flags[@]}" bash -c "$start" \
        "$python" "$launcher" "${addresses[*]}" --nnodes "$nodes" --nproc-per-node "$ranks" "${meeting[@]}" "$@"
}
