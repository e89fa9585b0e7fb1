# Completion of `echelon` in bash, as `echelon completion bash` prints it.
_echelon() {
    local program=${1/#\~/$HOME} action=file
    local -a answer=()
    mapfile -t answer < <("$program" completion --answer bash "${COMP_LINE:0:COMP_POINT}" "$COMP_WORDBREAKS" 2>/dev/null)
    COMPREPLY=("${answer[@]:1}")
    if [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=.:/,] ]]; then
        compopt -o nospace # it is gone on with
    fi
    if [[ ${answer[0]} == files || ${answer[0]} == folders ]]; then
        [[ ${answer[0]} == folders ]] && action=directory
        compopt -o filenames
        mapfile -t -O "${#COMPREPLY[@]}" COMPREPLY < <(compgen -A "$action" -- "$2")
    fi
}
complete -F _echelon echelon
