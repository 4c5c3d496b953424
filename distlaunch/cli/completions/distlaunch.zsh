#compdef distlaunch
# Completion of distlaunch for zsh.
_distlaunch() {
    local -a lines rows suffix
    local kind prefix
    lines=("${(@f)$("${(Q)words[1]}" completion --words zsh "${(@Q)words[2,CURRENT-1]}" "${(Q)PREFIX}" 2>/dev/null)}")
    kind=${lines[1]%%$'\t'*}
    prefix=${lines[1]#*$'\t'}
    (( $#prefix )) && compset -p $#prefix
    rows=("${(@)lines[2,-1]}")
    case $kind in
        files) _files ;;
        directories) _files -/ ;;
        words)
            [[ ${rows[1]%%:*} == *= ]] && suffix=(-S '')
            (( $#rows )) && _describe -o -t values value rows "${(@)suffix}"
            ;;
    esac
}
if [[ ${funcstack[1]:-} == _distlaunch ]]; then
    _distlaunch "$@"
else
    (( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
    compdef _distlaunch distlaunch
fi
