// Keeps the page current, and draws its charts.
import { drawCharts } from "./charts.js";
import { follow } from "./live.js";

const redraw = drawCharts();
follow(redraw);
