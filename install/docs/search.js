/* search.js - finds names, headings and words in entries.js: no server is asked. */
"use strict";

/* What is looked up: [kind, name, where, text]. `said`: [words that people say, where]. */
function dp_search(entries, said) {
    const STOP = new Set("a an and are as at be by do does how i in is it my of on or so that the to what when which with".split(" "));
    const KINDS = {page: 1.3, answer: 1.25, text: 1.1, function: 1.1, section: 1.1, header: 1.1, rule: 0.6};

    /* "Gradients" and "gradient" are one word. */
    function stem(word) {
        if (word.length < 4 || /[_+.]/.test(word)) return word;
        return word.replace(/ies$/, "y").replace(/(ions?|ing|ed|es|s|e)$/, "");
    }
    function split(text) {
        return (text.toLowerCase().match(/[a-z0-9_+]+(\.h\b)?/g) || []).map(stem);
    }
    function telling(words) {
        return words.some(word => !STOP.has(word)) ? words.filter(word => !STOP.has(word)) : words;
    }
    function count(words) {
        const found = new Map();
        for (const word of words) found.set(word, (found.get(word) || 0) + 1);
        return found;
    }

    const all = entries.map(([kind, name, url, text], place) => ({
        kind, name, url, text, place, plain: name.toLowerCase(),
        in_name: count(split([name, name.replace(/_/g, " "), name.replace(/^dp_|_/g, "")].join(" "))), in_text: count(split(text)), said: []
    }));
    const by_url = new Map(all.map(entry => [entry.url, entry]));
    for (const [phrases, url] of said)
        for (const phrase of phrases.split(", ")) by_url.get(url).said.push(telling(split(phrase)));

    /* Words that few entries have count more. */
    const holders = new Map();
    for (const entry of all)
        for (const word of new Set([...entry.in_name.keys(), ...entry.in_text.keys(), ...entry.said.flat()]))
            holders.set(word, (holders.get(word) || 0) + 1);
    const weight = word => Math.log(1 + all.length / (1 + (holders.get(word) || 0)));

    /* A word in a name counts most; what is typed last may be the beginning of a word. */
    function match(entry, word, is_last) {
        if (entry.in_name.has(word)) return 6;
        let best = 0;
        if (is_last && word.length > 1)
            for (const other of entry.in_name.keys()) if (other.startsWith(word)) best = 3;
        const times = entry.in_text.get(word) || 0;
        if (times > 0) best = Math.max(best, (1 + Math.log(times)) / (1 + entry.in_text.size / 400));
        else if (is_last && word.length > 2 && best === 0)
            for (const other of entry.in_text.keys()) if (other.startsWith(word)) best = 0.3;
        return best;
    }

    /* What people say for it: all of the words, or a phrase with other words around. */
    function said_of(entry, words) {
        let best = 0;
        for (const phrase of entry.said) {
            const shared = phrase.filter(word => words.includes(word)).length;
            if (shared === phrase.length) best = Math.max(best, 60 * shared / words.length);
        }
        return best;
    }

    function score(entry, query, words) {
        if (entry.plain === query || entry.plain === "dp_" + query) return 1000;
        let sum = 0, found = 0, whole = 0;
        words.forEach((word, i) => {
            const much = match(entry, word, i === words.length - 1), own = weight(word);
            whole += own;
            if (much > 0) found += own;
            sum += own * much;
        });
        const start = query.length > 2 && (entry.plain.startsWith(query) || entry.plain.startsWith("dp_" + query));
        return sum * (found / whole) ** 2 * (KINDS[entry.kind] || 1) + said_of(entry, words) + (start ? 20 : 0);
    }

    return function find(text) {
        const query = text.toLowerCase().trim(), words = telling(split(query));
        if (words.length === 0) return [];
        return all.map(entry => ({entry, score: score(entry, query, words)}))
            .filter(found => found.score > 0)
            .sort((a, b) => b.score - a.score || a.entry.name.length - b.entry.name.length ||
                            a.entry.place - b.entry.place)
            .slice(0, 30).map(found => found.entry);
    };
}

/* The field, and the list below it. */
function dp_search_page(root) {
    const input = document.getElementById("search");
    const list = document.getElementById("found");
    let find = null;

    function element(tag, text, className) {
        const made = document.createElement(tag);
        made.textContent = text;
        if (className) made.className = className;
        return made;
    }

    /* Of a long text, where the words are. */
    function excerpt(text, query) {
        const at = text.toLowerCase().search(new RegExp(query.trim().split(/\s+/)
            .map(word => word.replace(/[^a-z0-9_]/gi, ".")).join("|"), "i"));
        const from = at > 80 ? text.indexOf(" ", at - 60) + 1 : 0;
        return (from > 0 ? "... " : "") + text.slice(from, from + 220);
    }

    function show() {
        find = find || dp_search(dp_entries, dp_said);
        const entries = find(input.value);
        list.replaceChildren();
        for (const {kind, name, url, text} of entries) {
            const item = document.createElement("li");
            const link = element("a", name);
            link.href = root + url;
            item.append(link, element("span", kind, "kind"), element("p", excerpt(text, input.value)));
            list.append(item);
        }
        if (entries.length === 0) list.append(element("li", "Nothing has this name, or these words."));
        list.hidden = input.value.trim() === "";
    }

    input.addEventListener("input", show);
    input.addEventListener("keydown", event => {
        if (event.key === "Enter" && list.querySelector("a")) list.querySelector("a").click();
        if (event.key === "Escape") {
            input.value = "";
            input.blur();
            show();
        }
    });
    list.addEventListener("click", () => { list.hidden = true; });
    document.addEventListener("keydown", event => {
        if (event.key !== "/" || event.ctrlKey || event.target === input) return;
        event.preventDefault();
        input.focus();
    });

    const query = new URLSearchParams(location.search).get("q"); /* index.html?q=scatter */
    if (query) {
        input.value = query;
        show();
    }
    /* On a narrow screen the menu would stand before the text. */
    if (matchMedia("(max-width: 60rem)").matches) document.querySelector("nav details").open = false;
}

if (typeof document !== "undefined" && document.getElementById("search"))
    dp_search_page(document.currentScript.dataset.root);
