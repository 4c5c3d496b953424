# Completion of distlaunch for fish.
function __distlaunch_complete
    set -l before (commandline -opc)
    set -l word (commandline -ct)
    set -l lines ($before[1] completion --words fish $before[2..-1] "$word" 2>/dev/null)
    set -q lines[1]; or return
    set -l head (string split \t -- $lines[1])
    set -l prefix $head[2]
    set -l value (string sub --start (math (string length -- "$prefix") + 1) -- "$word")
    switch $head[1]
        case files
            for found in (__fish_complete_path "$value")
                printf '%s\n' "$prefix$found"
            end
        case directories
            for found in (__fish_complete_directories "$value")
                printf '%s\n' "$prefix$found"
            end
        case words
            for line in $lines[2..-1]
                printf '%s\n' $line
            end
    end
end
complete --command distlaunch --no-files --arguments '(__distlaunch_complete)'
