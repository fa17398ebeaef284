"""The report's style sheet: light or dark as the reader prefers, without external fonts or
images.
"""

STYLE = """
:root { color-scheme: light dark; --bg: #fdfdfc; --card: #ffffff; --ink: #1d2126; --soft: #626b75; --line: #e3e5e8; --accent: #0072b2;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #b07aa1; --c4: #b8860b; --c5: #56a4d8; --c6: #7d8a97; --c7: #8c564b; --c8: #c3c8ce;
  --c9: #e0a030; --c10: #4e79a7;
  --pos: 0 114 178; --neg: 213 94 0; --mono: ui-monospace, "SF Mono", "Cascadia Mono", Menlo, Consolas, monospace; }
@media (prefers-color-scheme: dark) { :root { --bg: #14171a; --card: #1b1f23; --ink: #e4e7ea; --soft: #97a1ab; --line: #2c3238;
  --accent: #58aee6; --c0: #58aee6; --c1: #f0883e; --c2: #2fc192; --c3: #cf9fc2; --c4: #d9b13c; --c5: #8cc8ee; --c6: #97a1ab; --c7:
  #c08b7f;
  --c8: #4a525a; --c9: #f0c060; --c10: #9ab8dd; --pos: 70 160 235; --neg: 240 125 40; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--ink); font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 2rem 1.25rem 5rem; }
h1 { font-size: 1.7rem; line-height: 1.2; letter-spacing: -.02em; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.12rem; letter-spacing: -.01em; margin: 2.8rem 0 .9rem; padding-top: .9rem; border-top: 1px solid var(--line); }
h3 { font-size: .95rem; margin: 1.6rem 0 .5rem; }
small, .about, .legend, figcaption span, .remark { color: var(--soft); font-weight: 400; font-size: .84rem; }
a { color: var(--accent); text-decoration: none; } a:hover { text-decoration: underline; }
nav { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; margin: .7rem 0 1.6rem; font-size: .88rem; }
code, pre, .tokens { font-family: var(--mono); font-size: .83rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: .8rem; }
.tile, figure, details, .card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
.tile { padding: .75rem .95rem; } .tile b { display: block; font-size: 1.42rem; font-weight: 600; letter-spacing: -.02em; line-height:
  1.3;
  font-variant-numeric: tabular-nums; } .tile i { font-style: normal; color: var(--soft); font-size: .84rem; }
.tile.hero { grid-column: span 2; } .tile.hero b { font-size: 1.9rem; } .tile .to { color: var(--soft); font-weight: 400; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 330px), 1fr)); gap: .9rem; }
figure { margin: 0; padding: .7rem .8rem .3rem; min-width: 0; }
figcaption { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 0 .8rem; font-weight: 600; font-size: .9rem; }
figcaption .keys { font-weight: 400; font-size: .8rem; color: var(--soft); }
.key { white-space: nowrap; display: inline-block; margin-right: .8em; }
.key::before { content: ""; display: inline-block; width: .65em; height: .65em; border-radius: 2px; margin-right: .4em; background:
  var(--k); }
.two svg { max-width: 440px; margin: auto; } svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { font: 10px system-ui, sans-serif; fill: var(--soft); font-variant-numeric: tabular-nums; }
.grid, .axis { stroke: var(--line); } .line { fill: none; stroke: var(--k); stroke-width: 2; stroke-linejoin: round; }
.line.thin { stroke-width: 1; opacity: .5; } .dot, .fill { fill: var(--k); } .band { fill: var(--k); opacity: .16; }
.c0 { --k: var(--c0); } .c1 { --k: var(--c1); } .c2 { --k: var(--c2); } .c3 { --k: var(--c3); } .c4 { --k: var(--c4); }
.c5 { --k: var(--c5); } .c6 { --k: var(--c6); } .c7 { --k: var(--c7); } .c8 { --k: var(--c8); }
.c9 { --k: var(--c9); } .c10 { --k: var(--c10); }
.hit { fill: transparent; } .hair { stroke: var(--soft); stroke-dasharray: 2 2; } .hair, .tip { visibility: hidden; pointer-events: none;
  }
.strip:hover .hair, .strip:hover .tip { visibility: visible; } svg text.tip { fill: var(--ink); font-size: 10.5px; }
.bar { margin-bottom: .5rem; display: flex; height: 1.5rem; border-radius: 6px; overflow: hidden; gap: 1px; } .bar span { background:
  var(--k); min-width: 1px;
  }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .87rem; }
th, td { text-align: left; vertical-align: top; padding: .4rem .7rem .4rem 0; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 500; white-space: nowrap; } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums;
  white-space: nowrap; }
td pre, .card pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; } td.text { min-width: 12rem; } .card { padding: .9rem
  1rem; }
.two { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: .9rem; align-items: start; }
details { padding: .2rem .9rem; margin: .5rem 0; } details[open] { padding-bottom: .8rem; }
summary { cursor: pointer; padding: .4rem 0; overflow-wrap: anywhere; } .about { margin: .7rem 0 .25rem; overflow-wrap: anywhere; }
.tokens { white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.85; padding: .4rem .6rem; border-left: 3px solid var(--line); }
.tokens.prompt { border-left-color: transparent; padding-left: .6rem; }
.tokens span { padding-bottom: 3px; }
.grey, .nl { color: var(--soft); } .nl { opacity: .6; } .legend span { border-radius: 3px; }
.tokens span[data-t]:hover, .tokens span[data-t]:focus { outline: 1.5px solid var(--ink); }
.tokens span[data-t]:hover::after { content: attr(data-t); position: fixed; left: 0; right: 0; bottom: 0; z-index: 9; padding: .55rem
  1.2rem;
  background: var(--ink); color: var(--bg); font: 13px/1.5 var(--mono); text-align: center; white-space: normal; }
.a0 { background: rgb(128 128 128 / .10); } .a1 { background: rgb(var(--pos) / .16); } .a2 { background: rgb(var(--pos) / .30); }
.a3 { background: rgb(var(--pos) / .45); } .a4 { background: rgb(var(--pos) / .60); } .n1 { background: rgb(var(--neg) / .16); }
.n2 { background: rgb(var(--neg) / .30); } .n3 { background: rgb(var(--neg) / .45); } .n4 { background: rgb(var(--neg) / .60); }
.p1 { box-shadow: inset 0 -1px var(--soft); } .p2 { box-shadow: inset 0 -2px var(--soft); } .p3 { box-shadow: inset 0 -1.5px var(--ink); }
.p4 { box-shadow: inset 0 -3px var(--ink); } .legend span { padding: .1rem .45rem; } .legend .grey { padding: 0; }
.dots { letter-spacing: .08em; } .dot-good { color: var(--c0); }
.dot-part { color: var(--c3); } .dot-bad { color: var(--c1); } .dot-unknown { color: var(--soft); }
.notes { padding: .7rem .95rem; margin-top: .8rem; border-left: 4px solid var(--c1); overflow-wrap: anywhere; } .notes ul { margin: .3rem 0;
  padding-left: 1.1rem; } .notes small { margin-right: .4rem; }
.error, .problems { color: var(--c1); font-size: .87rem; overflow-wrap: anywhere; }
@media (max-width: 520px) { main { padding: 1.2rem .8rem 4rem; } .tile.hero { grid-column: 1 / -1; } .tiles { grid-template-columns: 1fr
  1fr; } }
"""
