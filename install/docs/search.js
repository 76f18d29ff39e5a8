/* search.js - finds names, headings and words in entries.js: no server is asked. */
"use strict";

(function () {
    const root = document.currentScript.dataset.root;
    const input = document.getElementById("search");
    const list = document.getElementById("found");
    const MOST = 40;

    /* 0: not found. A name counts more than the words around it, a whole name most. */
    function score(entry, words) {
        const name = entry[1].toLowerCase();
        const text = entry[3].toLowerCase();
        let sum = 0;
        for (const word of words) {
            if (name === word) sum += 100;
            else if (name === "dp_" + word) sum += 90;
            else if (name.startsWith(word) || name.startsWith("dp_" + word)) sum += 40;
            else if (name.includes(word)) sum += 20;
            else if (text.includes(word)) sum += 1;
            else return 0;
        }
        return sum + (entry[0] === "function" ? 0.5 : 0);
    }

    function find(query) {
        const words = query.toLowerCase().split(/\s+/).filter(word => word !== "");
        if (words.length === 0) return [];
        return dp_entries.map((entry, place) => ({entry, place, score: score(entry, words)}))
            .filter(found => found.score > 0)
            .sort((a, b) => b.score - a.score || a.entry[1].length - b.entry[1].length ||
                            a.place - b.place)
            .slice(0, MOST).map(found => found.entry);
    }

    function element(tag, text, className) {
        const made = document.createElement(tag);
        made.textContent = text;
        if (className) made.className = className;
        return made;
    }

    function show() {
        const entries = find(input.value);
        list.replaceChildren();
        for (const [kind, name, url, text] of entries) {
            const item = document.createElement("li");
            const link = element("a", name);
            link.href = root + url;
            item.append(link, element("span", kind, "kind"), element("p", text));
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
})();
