#compdef echelon
# Completion of `echelon` in zsh, as `echelon completion zsh` prints it.
_echelon() {
    local program=${words[1]/#\~/$HOME} line text label
    local -a typed answer closed closed_labels open open_labels
    (( CURRENT > 2 )) && typed=("${(@Q)words[2,CURRENT-1]}")
    answer=("${(@f)$("$program" completion --answer zsh "${typed[@]}" "${(Q)PREFIX}" 2>/dev/null)}")
    for line in "${(@)answer[2,-1]}"; do
        text=${line%%$'\t'*}
        label=${line/$'\t'/  -- }
        if [[ $text == *[=.:/,] ]]; then # it is gone on with
            open+=("$text") open_labels+=("$label")
        else
            closed+=("$text") closed_labels+=("$label")
        fi
    done
    (( $#closed )) && compadd -l -d closed_labels -a closed
    (( $#open )) && compadd -l -S '' -d open_labels -a open
    case ${answer[1]} in
        files) compset -P '*='; _files ;;
        folders) compset -P '*='; _files -/ ;;
    esac
    (( compstate[nmatches] ))
}
if [[ ${funcstack[1]} == _echelon ]]; then
    _echelon "$@" # a file of $fpath
else
    compdef _echelon echelon # eval "$(echelon completion zsh)"
fi
