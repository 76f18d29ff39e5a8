# sass.awk - what a kernel's loop is made of, for sass.sh: reads what nvdisasm -c prints. Of the ways
# round a loop it takes the one that loads most, and of those the shortest: packs rather than
# elements, and no detour for numbers that are odd. A line for each kernel: its name, bytes on their
# way before the first is read, 128-bit loads, 128-bit stores of the whole kernel, f64 instructions,
# instructions.

function width(line) {
    return line ~ /\.128/ ? 16 : line ~ /\.64[ .]/ ? 8 : line ~ /\.[US]16/ ? 2 : line ~ /\.[US]8/ ? 1 : 4
}

# What an instruction reads has come, and so have the loads of its width before it.
function wait(line,    w) {
    while (match(line, /[^A-Z0-9]R[0-9]+/)) {
        w = awaited[substr(line, RSTART + 2, RLENGTH - 2)]
        if (w > 0) row[w] = 0
        line = substr(line, RSTART + RLENGTH)
    }
}

function load(line,    w, k) {
    w = width(line)
    sub(/.*LDG[.A-Z0-9]* R/, "", line)
    wait(" " substr(line, index(line, ",")))
    for (k = 0; k < w / 4; k++) awaited[line + k] = w
    if (++row[w] * w > bytes) bytes = row[w] * w
    if (w == 16) loads++
}

# from[n]: where the best way from instruction a to n comes from. Returns whether one leads to b.
function walk(a, b,    n, k, to, more) {
    split("", from)
    from[a] = a
    all[a] = loaded[a]
    steps[a] = 1
    for (n = a; n < b; n++) {
        to[1] = n in ends ? 0 : n + 1
        to[2] = n in target ? place[target[n]] : 0
        for (k = 1; k <= 2 && n in from; k++) {
            if (to[k] <= n || to[k] > b) continue
            more = all[n] + loaded[to[k]]
            if (to[k] in from && (more < all[to[k]] ||
                                  (more == all[to[k]] && steps[n] + 1 >= steps[to[k]]))) continue
            from[to[k]] = n
            all[to[k]] = more
            steps[to[k]] = steps[n] + 1
        }
    }
    return b in from
}

function go_round(a, b,    n, count, way) {
    if (!walk(a, b)) return
    for (n = b; n != a; n = from[n]) way[++count] = n
    way[++count] = a
    for (; count > 0; count--) {
        n = text[way[count]]
        if (n ~ /LDG/) load(n)
        else wait(n)
        if (n ~ / D(ADD|MUL|FMA|SETP|MNMX)|(F2F|I2F|F2I)[.A-Z0-9]*\.F64/) f64++
    }
}

function finish(    n, best, last) {
    if (kernel == "") return
    best = -1
    for (n in target) {
        n += 0
        if (place[target[n]] > n || !walk(place[target[n]], n)) continue
        if (all[n] > best || (all[n] == best && steps[n] < shortest)) {
            best = all[n]
            shortest = steps[n]
            last = n
        }
    }
    bytes = loads = f64 = 0
    split("", awaited)
    split("", row)
    if (best >= 0) go_round(place[target[last]], last)
    print kernel, bytes, loads, stores, f64, shortest
}

/^\.text\./ { finish(); kernel = "" }
/^\.text\.dp_cuda_/ {
    kernel = $1
    gsub(/^\.text\.dp_cuda_|:$/, "", kernel)
    count = stores = shortest = 0
    split("", target)
    split("", place)
    split("", ends)
    split("", loaded)
}
/^\.L_x_[0-9]+:/ { name = $1; sub(/:$/, "", name); place[name] = count + 1 }
/\/\*[0-9a-f]+\*\// {
    text[++count] = $0
    if (/LDG/) loaded[count] = width($0)
    if (/STG\.E\.128/) stores++
    if (/BRA/ && match($0, /\.L_x_[0-9]+/)) target[count] = substr($0, RSTART, RLENGTH)
    if (/\*\/ +(BRA `|EXIT)/) ends[count] = 1
}
END { finish() }
