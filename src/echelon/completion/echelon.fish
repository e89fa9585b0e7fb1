# Completion of `echelon` in fish, as `echelon completion fish` prints it.
function __echelon_complete
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    set -l answer ($words[1] completion --answer fish $words[2..-1] "$current" 2>/dev/null)
    test (count $answer) -gt 1; and printf '%s\n' $answer[2..-1]
    set -l key (string match -r '^[^=]*=' -- "$current")
    set -l value (string replace -r '^[^=]*=' '' -- "$current")
    switch "$answer[1]"
        case files
            for path in (__fish_complete_path "$value")
                printf '%s%s\n' "$key" "$path"
            end
        case folders
            for path in (__fish_complete_directories "$value")
                printf '%s%s\n' "$key" "$path"
            end
    end
end
complete -c echelon -f -a '(__echelon_complete)'
