"""The style sheet of the page: light and dark, wide and narrow, with colours that all can tell."""

STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --soft: #59636e; --back: #fff; --edge: #d8dee4;
 --datacenter: #0072b2; --federated: #00805c; --hybrid: #9c4f86; --rejected: #b35900;
 --dropped: #c1272d; --late: #8a6d00; }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --soft: #9aa5b1; --back: #0f141a;
 --edge: #30363d; --datacenter: #56b4e9; --federated: #2ec4a0; --hybrid: #d58cc0;
 --rejected: #f0a04b; --dropped: #ff7b72; --late: #e3c341; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1rem; background: var(--back); color: var(--text);
 font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
table { border-collapse: collapse; font-size: .88rem; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--edge); text-align: left;
 vertical-align: top; overflow-wrap: break-word; }
.facts td { overflow-wrap: anywhere; } .scroll table { min-width: 36rem; }
thead th { position: sticky; top: 0; background: var(--back); }
.facts th { font-weight: 500; color: var(--soft); white-space: nowrap; }
.scroll { max-height: 32rem; overflow: auto; border: 1px solid var(--edge); }
.charts { display: grid; gap: 1rem;
 grid-template-columns: repeat(auto-fit, minmax(min(24rem, 100%), 1fr)); }
figure { margin: 0; max-width: 30rem; } figcaption { font-size: .88rem; color: var(--soft); }
svg { display: block; width: 100%; height: auto; }
svg .tick { font-size: 11px; fill: var(--soft); }
svg .grid { stroke: var(--edge); fill: var(--edge); }
svg .line { fill: none; stroke: var(--soft); stroke-width: 1; }
svg .limit { stroke: var(--dropped); stroke-dasharray: 4 3; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .3rem 1rem; padding: 0;
 font-size: .88rem; }
.key { display: inline-block; width: .8em; height: .8em; margin-right: .35em; }
svg .datacenter { fill: var(--datacenter); } .key.datacenter { background: var(--datacenter); }
svg .federated, svg .accepted, svg .spent { fill: var(--federated); }
.key.federated, .key.accepted { background: var(--federated); }
svg .hybrid { fill: var(--hybrid); } .key.hybrid { background: var(--hybrid); }
svg .rejected { fill: var(--rejected); } .key.rejected { background: var(--rejected); }
svg .dropped, svg .failed { fill: var(--dropped); } .key.dropped { background: var(--dropped); }
svg .late { fill: var(--late); } .key.late { background: var(--late); }
.series0 { color: #2f81c4; } .series1 { color: #d9690f; } .series2 { color: #149a73; }
.series3 { color: #b565a0; } .series4 { color: #a3861a; } .series5 { color: #45a6d9; }
.series6 { color: #d64545; } .series7 { color: #76818d; }
svg circle[class*=series] { fill: currentColor; } .key[class*=series] { background: currentColor; }
svg polyline[class*=series] { fill: none; stroke: currentColor; stroke-width: 1.5; }
svg polyline.again { stroke-dasharray: 6 3; }
.failure { color: var(--dropped); } footer { margin-top: 2rem; color: var(--soft); }
"""
