#!/bin/sh
# Plays srun: starts the program on each "node" of --nodelist, all on this machine, with its stdin. $CALLS gets the options.
# The list is n1 or n[1-3].
# $RELAY: what starts the task of the node $RELAYED, in place of the program itself.
# $SAYS: say that, and fail. $WAITS: say that, and wait. $LATE: this node's task never starts.
printf '%s\n' "$*" | sed 's/ \/bin\/sh .*//' >>"$CALLS"
for word; do
    case $word in
        --nodelist=*\[*)
            first=${word#*\[}
            last=${first#*-}
            nodes=$(seq -f n%g "${first%-*}" "${last%]}")
            ;;
        --nodelist=*) nodes=${word#*=} ;;
        /bin/sh) break ;;
    esac
    shift
done
if [ -n "$SAYS" ]; then
    printf '%s\n' "$SAYS" >&2
    exit 1
fi
if [ -n "$WAITS" ]; then
    printf '%s\n' "$WAITS" >&2
    exec sleep 1000
fi
code=$(mktemp "$CALLS.XXXXXX")
cat >"$code"
id=0
for node in $nodes; do
    relay=
    [ "$node" != "$RELAYED" ] || relay=$RELAY
    [ "$node" = "$LATE" ] || SLURMD_NODENAME=$node SLURM_NODEID=$id setsid -w $relay "$@" <"$code" &
    id=$((id + 1))
done
wait
rm "$code"
