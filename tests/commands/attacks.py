"""Texts that a model, a data set or a file may have, and that must stay text on a page."""

from __future__ import annotations

RUN = "window.attacked = (window.attacked || 0) + 1"
"""A script that leaves a mark."""

ATTACKS: dict[str, str] = {
    "script": f"<script>{RUN}</script>",
    "end of a script": f"</script><script>{RUN}</script>",
    "end of a script in capitals": f"</SCRIPT ><script>{RUN}</script>",
    "comment in a script": f"<!--<script></script><script>{RUN}</script>",
    "event handler": f'<img src=x onerror="{RUN}">',
    "svg": f"<svg onload={RUN!r}></svg>",
    "iframe": f'<iframe srcdoc="<script>parent.{RUN}</script>"></iframe>',
    "attribute": f'" autofocus onfocus="{RUN}" x="',
    "attribute of a style": f'red;background:url("javascript:{RUN}")',
    "link": f'<a href="javascript:{RUN}">press</a>',
    "bare link": f"javascript:{RUN}",
    "data link": f'<a href="data:text/html,<script>{RUN}</script>">press</a>',
    "entities": f"&lt;script&gt;{RUN}&lt;/script&gt;&#60;img src=x onerror='{RUN}'&#62;",
    "line separators": f"one\u2028{RUN}\u2029two",
    "end of a string": f"\\\"');{RUN}//",
    "template": f"${{{RUN}}} {{{{ {RUN} }}}} {{% raw %}}",
    "prototype": "__proto__",
    "constructor": "constructor",
    "escapes of a terminal": "\x1b[2J\x1b]0;title\x07",
    "NUL": "before\0after",
    "right to left": "\u202ereversed\u202c",
    "mathematics": "$\\href{javascript:alert(1)}{press}$",
    "huge": "<b>" * 30_000,
    "one long word": "w" * 100_000,
}
