import "@fontsource-variable/inter/wght.css";
import "./app.css";
import { mount } from "svelte";
import App from "./App.svelte";

const page = document.getElementById("page")!;
page.replaceChildren(); // what stood there until the program had come
mount(App, { target: page });
