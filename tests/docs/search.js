/* search.js - what the site's search finds for the words in tests/docs/queries: a line for each that has
   no right page among the first three, and how many have.

   cat build/docs/entries.js build/docs/search.js tests/docs/search.js, with dp_queries before: node,
   or a browser. */

const dp_find = dp_search(dp_entries, dp_said), dp_lines = [];
let dp_good = 0;
for (const [query, wanted] of dp_queries) {
    const found = dp_find(query).slice(0, 3).map(entry => entry.url);
    const right = found.some(url => wanted.split(" ").some(
        want => url === want || (!want.includes("#") && url.startsWith(want + "#"))));
    if (right) dp_good++;
    else dp_lines.push(`${query}: ${found.join(" ")}`);
}
dp_lines.push(`${dp_good} of ${dp_queries.length}`);
if (typeof document === "undefined") console.log(dp_lines.join("\n"));
else document.body.append(Object.assign(document.createElement("pre"), {textContent: dp_lines.join("\n")}));
