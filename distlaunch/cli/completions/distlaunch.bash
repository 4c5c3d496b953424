# Completion of distlaunch for bash.
_distlaunch() {
    local lines kind
    mapfile -t lines < <("$1" completion --words bash "${COMP_LINE:0:COMP_POINT}" "$2" 2>/dev/null)
    kind=${lines[0]%%$'\t'*}
    COMPREPLY=("${lines[@]:1}")
    case $kind in
        files) compopt -o default ;;
        directories) compopt -o dirnames ;;
        words) [[ ${COMPREPLY[0]:-} == *= ]] && compopt -o nospace ;;
    esac
}
complete -F _distlaunch distlaunch
