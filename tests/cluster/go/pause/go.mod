module kvline.dev/pause

go 1.26.0
